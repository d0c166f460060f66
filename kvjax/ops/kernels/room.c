/* Memory that each thread keeps for its next piece of work. */
#include "kernels.h"

#include <pthread.h>

typedef struct {
    float *floats;
    int64_t held;
} Room;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t rooms; /* a thread's Room, freed when the thread ends */
static int no_rooms;        /* whether the key could not be made */

static void free_room(void *room) {
    free(((Room *)room)->floats);
    free(room);
}

static void make_rooms(void) { no_rooms = pthread_key_create(&rooms, free_room); }

float *room_for(int64_t floats) {
    pthread_once(&once, make_rooms);
    if (no_rooms) return NULL;
    Room *room = pthread_getspecific(rooms);
    if (!room) {
        room = calloc(1, sizeof *room);
        if (!room || pthread_setspecific(rooms, room)) {
            free(room);
            return NULL;
        }
    }
    if (!room->floats || floats > room->held) {
        free(room->floats);
        room->held = floats / 1024 * 1024 + 1024;
        room->floats = aligned_alloc(64, room->held * sizeof *room->floats);
    }
    return room->floats;
}
