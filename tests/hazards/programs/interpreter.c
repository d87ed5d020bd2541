// A program that an interpreter is linked into, which says which version it is (as `PY_VERSION_HEX` has it) and whether it is
// free-threaded. Nobody may ask it for anything else, nor look for frames where another version has them.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

unsigned long Py_Version, _PyRuntime[512], PyCode_Type[64], PyFrame_Type[64];

void *PyGILState_GetThisThreadState(void) { abort(); }
int Py_IsFinalizing(void) { abort(); }
void *PyInterpreterState_Main(void) { abort(); }

static __attribute__((noinline)) int evaluate(void) {
    void *at;
    return cudaMalloc(&at, 1 << 20) + cudaFree(at);
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    Py_Version = strtoul(argv[1], NULL, 16);
    memcpy(_PyRuntime, "xdebugpy", 8);
    _PyRuntime[1] = Py_Version;
    _PyRuntime[2] = strtoul(argv[2], NULL, 10);
    for (int i = 0; i < 100; i++)
        if (evaluate()) return 1;
    puts("ok");
}
