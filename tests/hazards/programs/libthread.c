// A library whose constructor starts a thread that allocates, and waits for it, unless `DETACHED` is set.

#include <pthread.h>
#include <stdlib.h>

#include "cuda.h"

static void *work(void *argument) {
    void *at;
    for (int i = 0; i < 1000; i++)
        if (cudaMalloc(&at, 100) == 0) cudaFree(at);
    return argument;
}

__attribute__((constructor)) static void begin(void) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, NULL)) return;
    if (getenv("DETACHED")) pthread_detach(thread);
    else pthread_join(thread, NULL);
}
