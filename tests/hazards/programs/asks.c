// One thread asks how much of the device is free, again and again, while another one takes and gives back. Then it is killed.
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "cuda.h"

#pragma weak cudaMemGetInfo
int cudaMemGetInfo(size_t *free, size_t *total);

static void *ask(void *none) {
    for (;;) {
        size_t free, total;
        cudaMemGetInfo(&free, &total);
    }
    return none;
}

int main(int argc, char **argv) {
    enum { KEPT = 16 };
    void *kept[KEPT] = {0};
    pthread_t asking;
    int calls = argc > 1 ? atoi(argv[1]) : 1000;
    if (cudaMalloc(&kept[0], 1 << 20) || pthread_create(&asking, NULL, ask, NULL)) return 1;
    for (int i = 0; i < calls; i++) {
        void **at = &kept[i % KEPT];
        if (*at) cudaFree(*at);
        cudaMalloc(at, (size_t)(64 + 2 * (i % 7)) << 20);
    }
    kill(getpid(), SIGKILL);
}
