/* Handlers of the kernels: each takes a call of XLA's, or says why not. */
#pragma once
#include "../ffi.h"

XLA_FFI_Error *on_rows(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_codes(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_softmax(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_assign(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_vectors(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_softmax_mean(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_best(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_cut(XLA_FFI_CallFrame *call);
XLA_FFI_Error *on_copy(XLA_FFI_CallFrame *call);
