// Fills the ring and asks for a snapshot while two threads go on allocating. Prints by how much the process's memory was
// larger than before at its peak, and how many pairs the threads made meanwhile.
//
// Arguments: pairs before the snapshot, the snapshot's path, and microseconds that each thread rests after 32 pairs.

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"

enum { THREADS = 2 };
static _Atomic long pairs[THREADS];
static long rest;

static void pair(void) {
    void *at = NULL;
    if (cudaMalloc(&at, 1000) != 0 || cudaFree(at) != 0) {
        fprintf(stderr, "cudaMalloc failed\n");
        _exit(9);
    }
}

static void *work(void *argument) {
    for (;;) {
        pair();
        long made = ++*(_Atomic long *)argument;
        if (rest && made % 32 == 0) usleep(rest);
    }
    return NULL;
}

static long memory(const char *what) {
    char line[256];
    long kib = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, what, strlen(what))) kib = atol(line + strlen(what));
    if (f) fclose(f);
    return kib;
}

int main(int argc, char **argv) {
    if (argc != 4) return 8;
    rest = atol(argv[3]);
    int (*dump)(const char *) = (int (*)(const char *))dlsym(RTLD_DEFAULT, "memtrace_dump");
    for (long i = atol(argv[1]); i > 0; i--) pair();
    for (int i = 0; i < THREADS; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, (void *)&pairs[i]) != 0) return 8;
    }
    while (!pairs[0] || !pairs[1]) usleep(100);
    FILE *reset = fopen("/proc/self/clear_refs", "w"); // the peak begins anew
    if (!dump || !reset || fputs("5", reset) < 0 || fclose(reset) != 0) return 8;
    long before = memory("VmHWM:"), made = pairs[0] + pairs[1];
    if (dump(argv[2]) != 0) return 7;
    made = pairs[0] + pairs[1] - made;
    printf("grew %ld KiB, %ld pairs meanwhile\n", memory("VmHWM:") - before, made);
    fflush(stdout);
    _Exit(0);
}
