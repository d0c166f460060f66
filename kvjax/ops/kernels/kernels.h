/* XLA handlers of the kernels, each of which returns an error or NULL, and memory that kernels share. */
#pragma once
#include "../../ffi.h"

XLA_FFI_Error *on_rows(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_codes(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_softmax(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_assign(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_vectors(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_weights(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_copy(XLA_FFI_CallFrame *call);

/* Returns memory of this thread for a piece of work, or NULL. It is reused for the next piece: one array for all pieces would
 * leave the processor's caches before it is read again. */
float *room_for(int64_t floats);
