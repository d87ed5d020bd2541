// Called by Python with the GIL held: waits for a C++ thread that allocates, which Python has never seen.

#include <pthread.h>

#include "cuda.h"

static void *work(void *argument) {
    return (void *)(long)cudaMalloc(argument, 4321);
}

int wait_for_a_thread_that_allocates(void) {
    static void *at;
    void *code = (void *)1;
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, &at) != 0) return 1;
    pthread_join(thread, &code);
    return code != NULL;
}
