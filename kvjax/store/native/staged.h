/* Rows that are committed and not in the file yet (staged.c). */
#pragma once
#include "blocks.h"

/* A list of what is staged of the marked blocks, in the order in which it is to be laid over to->staged[n], flat slots, which
 * take the place of ids and slots; NULL on an exception. The volume's lock is held. */
PyObject *list_staged(const Window *window, Wanted *to);

/* Lays such a list, or NULL, over the slots; whether no exception came of it. */
int lay_over(PyObject *list, const Window *window, const Wanted *to);
