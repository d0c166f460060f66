/* Handlers of the kernels: each takes a call of XLA's, or says why not; and what they share. */
#pragma once
#include "../../ffi.h"

XLA_FFI_Error *on_rows(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_codes(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_softmax(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_assign(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_vectors(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_vector(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_softmax_mean(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_best(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_cut(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_split(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_survey(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_copy(XLA_FFI_CallFrame *call);

/* Memory of this thread for numbers of a piece of work, which stays for the next: an array for all pieces would leave the
 * processor's caches before it is read again. NULL if there is none. */
float *room_for(int64_t floats);
