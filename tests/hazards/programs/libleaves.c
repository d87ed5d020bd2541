// A CUDA runtime of which a call may end in another way than by its return: `LEAVES` says how. "cancel": it comes to a point
// where a thread can be cancelled. "exit": it ends the thread. "jump": it raises a signal, whose handler may jump.
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t next = 0x700000000000;

static const char *leaves(void) {
    const char *how = getenv("LEAVES");
    return how ? how : "";
}

// A thread that sets this leaves at its next call.
__thread int leaves_now;

int cudaMalloc(void **out, size_t size) {
    *out = (void *)__atomic_fetch_add(&next, (size + 511) & ~(uint64_t)511, __ATOMIC_RELAXED);
    if (leaves_now && !strcmp(leaves(), "cancel")) usleep(1000000);
    if (leaves_now && !strcmp(leaves(), "exit")) pthread_exit((void *)7);
    if (leaves_now && !strcmp(leaves(), "jump")) raise(SIGUSR1);
    return 0;
}

int cudaFree(void *at) {
    (void)at;
    return 0;
}

int cudaGetDevice(int *device) { return *device = 0; }
int cuInit(unsigned flags) { return flags != 0; }
int cuCtxGetDevice(int *device) { return *device = 0; }

int cuCtxGetCurrent(void **context) {
    *context = (void *)0x1000;
    return 0;
}
