/* Module of the kernels for operations that are slow in XLA:CPU; compiled programs call them through XLA's foreign function
 * interface. Shapes are in __init__.py.
 */
#include "kernels.h"

static const Target kernels[] = {{"row_attention", on_rows}, {"code_products", on_codes}, {"code_softmax", on_softmax},
                                 {"vector_products", on_vectors}, {"weight_products", on_weights},
                                 {"assign", on_assign}, {"copy", on_copy}, {NULL, NULL}};

/* handlers() -> {name: capsule} */
static PyObject *handlers(PyObject *self, PyObject *none) { return capsules(kernels); }

static PyMethodDef methods[] = {{"handlers", handlers, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_compiled", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compiled(void) { return with_version(PyModule_Create(&module)); }
