// Programs with little room: for the record of what they do, or for everything.
//
// "churn CALLS KEEP [close-first|close-later] [kill]" allocates, and frees all but each KEEPth; its descriptors may be
// closed before the first call or after it. "limit NAME BYTES CALLS [KEEP [TAKEN]]" sets a limit on itself before the first call, when it has
// taken so much memory already.
// "handler CALLS [driver]" is interrupted by a signal whose handler allocates; prints how often. "inside CALLS" gets its signals from
// a runtime in the middle of its calls (`libover.c`); prints what the handler did. Every one prints "ok".

#include <linux/capability.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include "cuda.h"

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    _exit(9);
}

static void churn(long calls, long keep) {
    for (long i = 0; i < calls; i++) {
        void *at = NULL;
        if (cudaMalloc(&at, 100) != 0) fail("cudaMalloc failed");
        if (i % keep != 0 && cudaFree(at) != 0) fail("cudaFree failed");
    }
}

static void close_all(void) { syscall(SYS_close_range, 3, ~0u, 0); }

static void limit(const char *name, rlim_t bytes) {
    static const struct { const char *name; int resource; } all[] = {
        {"as", RLIMIT_AS},       {"data", RLIMIT_DATA},     {"fsize", RLIMIT_FSIZE},
        {"nofile", RLIMIT_NOFILE}, {"memlock", RLIMIT_MEMLOCK}, {"stack", RLIMIT_STACK},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        struct rlimit to = {bytes, bytes};
        if (strcmp(all[i].name, name) == 0 && setrlimit(all[i].resource, &to) != 0) fail("setrlimit failed");
    }
    if (strcmp(name, "memlock") == 0) {
        // Who may lock what they like have no limit.
        struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
        struct __user_cap_data_struct sets[2];
        if (bytes > 0 && bytes != RLIM_INFINITY && syscall(SYS_capget, &head, sets) == 0) {
            sets[0].effective &= ~(1u << CAP_IPC_LOCK);
            syscall(SYS_capset, &head, sets);
        }
        mlockall(MCL_FUTURE);
    }
}

// Is a black box among what is locked in memory?
static int is_locked(void) {
    char line[4096];
    int is_box = 0, found = 0;
    FILE *maps = fopen("/proc/self/smaps", "r");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        if (strstr(line, ".blackbox") != NULL) is_box = 1;
        if (strncmp(line, "VmFlags:", 8) == 0) found |= is_box && strstr(line, " lo") != NULL, is_box = 0;
    }
    if (maps != NULL) fclose(maps);
    return found;
}

static volatile long handled;

static int by_driver;

static void handler(int signal) {
    (void)signal;
    void *at = NULL;
    if ((by_driver ? cuMemAlloc_v2((unsigned long long *)&at, 7777) : cudaMalloc(&at, 7777)) != 0) _exit(9);
    handled++;
}

// Five ways to take memory in turn, and one to give it back.
static void handler_inside(int signal) {
    (void)signal;
    static unsigned long long last;
    unsigned long long at = 0, handle = 0;
    int code = 0;
    switch (handled++ % 5) {
    case 0: code = cuMemAlloc_v2(&at, 7777); break;
    case 1: code = cudaMalloc((void **)&at, 8888); break;
    case 2: code = cuMemAlloc_v2(&last, 9999); break;
    case 3: code = cuMemFree_v2(last); break;
    case 4:
        code = cuMemCreate(&handle, 2 << 20, NULL, 0) || cuMemAddressReserve(&at, 2 << 20, 0, 0, 0) || cuMemMap(at, 2 << 20, 0, handle, 0);
    }
    if (code != 0) _exit(9);
}

static void inside(long calls) {
    struct sigaction action = {.sa_handler = handler_inside};
    sigaction(SIGUSR1, &action, NULL);
    while (handled < calls) churn(1, 1), churn(2, 3);
    printf("handled %ld\n", handled);
}

static void interrupted(long calls) {
    signal(SIGUSR1, SIG_IGN); // of `libover.c`
    churn(1, 1);
    struct sigaction action = {.sa_handler = handler};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval often = {{0, 300}, {0, 300}};
    setitimer(ITIMER_REAL, &often, NULL);
    while (handled < calls) {
        void *at = NULL;
        if (cudaMalloc(&at, 100) != 0 || cudaFree(at) != 0) fail("a call failed");
    }
    struct itimerval never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &never, NULL);
    signal(SIGALRM, SIG_IGN);
    printf("handled %ld\n", handled);
}

int main(int argc, char **argv) {
    if (argc < 3) return 8;
    if (strcmp(argv[1], "churn") == 0) {
        const char *how = argc > 4 ? argv[4] : "";
        if (strcmp(how, "close-first") == 0) close_all();
        churn(1, 1);
        usleep(50000);
        if (strcmp(how, "close-later") == 0) close_all();
        churn(atol(argv[2]), atol(argv[3]));
        if (strcmp(argv[argc - 1], "kill") == 0) raise(SIGKILL);
    } else if (strcmp(argv[1], "limit") == 0 && argc > 4) {
        size_t taken = argc > 6 ? strtoul(argv[6], NULL, 0) : 0;
        int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        if (taken > 0 && mmap(NULL, taken, PROT_READ | PROT_WRITE, how, -1, 0) == MAP_FAILED) fail("mmap failed");
        limit(argv[2], strtoul(argv[3], NULL, 0));
        churn(atol(argv[4]), argc > 5 ? atol(argv[5]) : 10);
        if (strcmp(argv[2], "memlock") == 0 && is_locked()) fail("the box is locked in memory");
    } else if (strcmp(argv[1], "handler") == 0) {
        by_driver = argc > 3;
        interrupted(atol(argv[2]));
    } else if (strcmp(argv[1], "inside") == 0) {
        inside(atol(argv[2]));
    } else {
        return 8;
    }
    puts("ok");
    return 0;
}
