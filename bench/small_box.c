// Allocations and frees, of which one in ten stays; prints the nanoseconds of a processor that
// a call took, window by window. Arguments: calls in a window, windows, and "close" to close
// every descriptor after the first call.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#pragma weak cudaMalloc
#pragma weak cudaFree
int cudaMalloc(void **out, size_t size);
int cudaFree(void *at);

// Of all threads: the background thread's share is part of the cost.
static double now(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return 1e9 * (used.ru_utime.tv_sec + used.ru_stime.tv_sec) + 1e3 * (used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

int main(int argc, char **argv) {
    if (argc < 3) return 8;
    long calls = atol(argv[1]), windows = atol(argv[2]);
    void *at;
    if (cudaMalloc(&at, 1) != 0) return 9;
    usleep(100000);
    if (argc > 3) syscall(SYS_close_range, 3, ~0u, 0);
    for (long w = 0; w < windows; w++) {
        double start = now();
        for (long i = 0; i < calls; i++) {
            if (cudaMalloc(&at, 100) != 0) return 9;
            if (i % 10) cudaFree(at);
        }
        printf("%.1f\n", (now() - start) / calls);
        fflush(stdout);
    }
    syscall(SYS_exit_group, 0); // without a snapshot, which is measured elsewhere
}
