// A library whose constructor starts a thread that allocates, and does not wait for it.

#include <pthread.h>

#include "cuda.h"

static void *work(void *argument) {
    void *at;
    for (int i = 0; i < 1000; i++)
        if (cudaMalloc(&at, 100) == 0) cudaFree(at);
    return argument;
}

__attribute__((constructor)) static void begin(void) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, NULL) == 0) pthread_detach(thread);
}
