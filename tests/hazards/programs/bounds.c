// Where a thread's own stack ends, and what is on a stack for signals. Prints "ok" and how many bytes of the stack a call took
// below its caller.
// bounds WHAT
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "cuda.h"

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    _exit(9);
}

__attribute__((noinline)) static void allocate(void) {
    void *at = NULL;
    if (cudaMalloc(&at, 1000) != 0 || at == NULL || cudaFree(at) != 0) _exit(9);
}

// --- how much of the stack is used ----------------------------------------------------------------------

enum { BELOW = 12 << 10 };

// Both have the same frame, if they are called from the same function.
__attribute__((noinline)) static size_t below(int paint) {
    volatile unsigned char area[BELOW];
    size_t i = 0;
    if (paint)
        for (; i < BELOW; i++) area[i] = 0xa5;
    else
        while (i < BELOW && area[i] == 0xa5) i++;
    return BELOW - i;
}

static size_t used_by_calls(void) {
    size_t used = 0;
    for (int i = 0; i < 3; i++) {
        below(1);
        allocate();
        used = below(0);
    }
    return used;
}

static void without_descriptors(void) {
    struct rlimit none = {0, 0};
    if (setrlimit(RLIMIT_NOFILE, &none) != 0) fail("setrlimit");
}

// --- a stack for signals ---------------------------------------------------------------------------------

static stack_t stack = {.ss_size = 64 << 10};
static volatile int over;
static volatile long seconds, calls;

static void second(int signal) {
    (void)signal;
    volatile unsigned char area[2048];
    for (size_t i = 0; i < sizeof area; i++) area[i] = 0x5a;
    seconds++;
}

static void first(int signal) {
    volatile uint64_t live[64];
    for (int i = 0; i < 64; i++) live[i] = i * 0x0101010101010101;
    while (seconds < 500) {
        allocate();
        calls++;
        for (int i = 0; i < 64; i++)
            if (live[i] != i * 0x0101010101010101) fail("the first handler's frame was overwritten");
    }
    // What was changed meanwhile is as it was.
    sigset_t blocked;
    stack_t now;
    if (pthread_sigmask(SIG_SETMASK, NULL, &blocked) != 0 || sigaltstack(NULL, &now) != 0) fail("no state");
    for (int i = 1; i < 65; i++)
        if (sigismember(&blocked, i) != (i == signal)) fail("the mask is another one");
    if (now.ss_sp != stack.ss_sp || now.ss_size != stack.ss_size || now.ss_flags != SS_ONSTACK) fail("the stack is another one");
}

static void *send(void *to) {
    while (!over) {
        pthread_kill(*(pthread_t *)to, SIGUSR2);
        usleep(20);
    }
    return NULL;
}

static void second_signal(void) {
    stack.ss_sp = mmap(NULL, stack.ss_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack.ss_sp == MAP_FAILED || sigaltstack(&stack, NULL) != 0) fail("sigaltstack");
    sigaction(SIGUSR1, &(struct sigaction){.sa_handler = first, .sa_flags = SA_ONSTACK}, NULL);
    sigaction(SIGUSR2, &(struct sigaction){.sa_handler = second, .sa_flags = SA_ONSTACK}, NULL);
    pthread_t self = pthread_self(), sender;
    if (pthread_create(&sender, NULL, send, &self) != 0) fail("pthread_create");
    raise(SIGUSR1);
    over = 1;
    pthread_join(sender, NULL);
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
#define IS(name) (strcmp(argv[1], name) == 0)
    size_t used = 0;
    if (IS("second_signal")) allocate(), second_signal();
    else if (IS("usual")) used = used_by_calls();
    else if (IS("without_descriptors")) without_descriptors(), used = used_by_calls();
    else return 2;
    printf("ok %zu\n", used);
    return 0;
}
