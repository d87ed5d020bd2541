// Memory that two processes share. The first argument is how: "ipc" (runtime), "driver-ipc".
// The program starts itself: the second one ("export", its own first argument) holds the memory.
#include "client.h"
#include <unistd.h>

static void give(int by_driver) {
    ipc_handle handle;
    handle_t context;
    void *at;
    if (by_driver) {
        cuInit(0);
        cuDevicePrimaryCtxRetain(&context, 0), cuCtxSetCurrent(context);
        addr_t addr;
        if (cuMemAlloc_v2(&addr, 5 << 20) || cuIpcGetMemHandle(&handle, addr)) fail("export", "cuIpcGetMemHandle");
    } else if (cudaMalloc(&at, 5 << 20) || cudaIpcGetMemHandle(&handle, at)) {
        fail("export", "cudaIpcGetMemHandle");
    }
    if (write(1, &handle, sizeof handle) != sizeof handle) fail("export", "write");
    char end;
    while (read(0, &end, 1) > 0) {}
    _exit(0); // no snapshot's line among the other's
}

int main(int argc, char **argv) {
    int by_driver = argc > 1 && strcmp(argv[1], "driver-ipc") == 0;
    if (argc > 2) give(by_driver);
    int to[2], from[2];
    if (pipe(to) || pipe(from)) fail("pipe", "none");
    if (fork() == 0) {
        dup2(to[0], 0), dup2(from[1], 1);
        close(to[1]), close(from[0]);
        setenv("MEMTRACE_QUIET", "1", 1);
        execl(argv[0], argv[0], argv[1], "export", NULL);
        _exit(9);
    }
    close(from[1]);
    ipc_handle handle;
    if (read(from[0], &handle, sizeof handle) != sizeof handle) fail("import", "the other process is gone");
    if (by_driver) {
        handle_t context;
        addr_t at;
        if (cuInit(0)) fail("cuInit", "no device");
        CALL(cuDevicePrimaryCtxRetain, &context, 0);
        CALL(cuCtxSetCurrent, context);
        device[0].contexts++;
        CALL(cuIpcOpenMemHandle_v2, &at, handle, 1);
        step("open");
        CALL(cuIpcCloseMemHandle, at);
    } else {
        void *at;
        CALL(cudaIpcOpenMemHandle, &at, handle, 1);
        step("open");
        CALL(cudaIpcCloseMemHandle, at);
    }
    step("close");
    return 0;
}
