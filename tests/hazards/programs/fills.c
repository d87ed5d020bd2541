// Takes memory, writes a snapshot to the first path, runs the second argument, and writes it once more. Prints what both calls
// returned; exits with 7.
#include <stdio.h>
#include <stdlib.h>

#include "cuda.h"

#pragma weak memtrace_dump
int memtrace_dump(const char *path);

int main(int argc, char **argv) {
    if (argc < 3) return 8;
    for (int i = 0; i < 20000; i++) {
        void *at = NULL;
        if (cudaMalloc(&at, 100) != 0) return 9;
    }
    int first = memtrace_dump(argv[1]);
    if (system(argv[2]) != 0) return 9;
    printf("%d %d\n", first, memtrace_dump(argv[1]));
    return 7;
}
