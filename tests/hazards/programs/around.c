// What is around a program: other tools' runtimes, another root folder, an empty environment. The argument says which.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda.h"

static void take(size_t size) {
    void *at;
    if (cudaMalloc(&at, size) != 0) {
        fprintf(stderr, "cudaMalloc failed\n");
        _exit(9);
    }
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (strncmp(what, "cleared", 7) == 0) clearenv();
    if (strcmp(what, "cleared and filled") == 0 && setenv("ANYTHING", "1", 1)) return 2;
    take(1111);
    if (strcmp(what, "jail") == 0) {
        if (mkdir("jail", 0755) || chroot("jail") || chdir("/")) return 3;
        take(2222);
    }
    puts("ok");
    return 0;
}
