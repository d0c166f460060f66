/* Rows that are committed but not in the file yet (staged.c). */
#pragma once
#include "blocks.h"

/* Returns a list of the `Staged` of the marked blocks, in the order in which they are to be copied, and replaces the
 * ids and slots in to->staged by the flat slot of each; NULL on an exception. The volume's lock is held. */
PyObject *list_staged(const Window *window, Wanted *to);

/* Copies the rows of such a list, or of NULL, over the slots; returns whether there was no exception. */
int lay_over(PyObject *list, const Window *window, const Wanted *to);
