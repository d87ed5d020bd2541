// Calls that are left otherwise than by their return: left HOW COUNT.
//   cancel, exit   threads that end in a call (`libleaves.c`); their clean-up handlers run
//   jump           a signal handler jumps out of the real call
//   alarm          a signal handler jumps out of wherever the thread is, also out of the recorder
// Then the main thread makes 1,000 allocations of 7,777 bytes, from deeper on its stack.
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "cuda.h"

extern __thread int leaves_now __attribute__((weak));
static int cleaned, count;
static const char *how;
static sigjmp_buf back;

static void clean(void *unused) {
    (void)unused;
    __atomic_fetch_add(&cleaned, 1, __ATOMIC_RELAXED);
}

static void *thread(void *unused) {
    void *at;
    pthread_cleanup_push(clean, unused);
    cudaMalloc(&at, 1);
    leaves_now = 1;
    cudaMalloc(&at, 1);
    pthread_cleanup_pop(1);
    return NULL;
}

static void jump(int signal) {
    (void)signal;
    siglongjmp(back, 1);
}

static void jumps(void) {
    struct sigaction action = {.sa_handler = jump, .sa_flags = SA_NODEFER};
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGALRM, &action, NULL);
    void *at;
    for (volatile int i = 0; i < count; i++) {
        if (sigsetjmp(back, 1)) continue;
        if (!strcmp(how, "jump")) {
            leaves_now = 1;
            cudaMalloc(&at, 1);
        }
        struct itimerval soon = {{0, 0}, {0, 50 + i % 100}};
        setitimer(ITIMER_REAL, &soon, NULL);
        for (;;) {
            cudaMalloc(&at, 1);
            cudaFree(at);
        }
    }
    struct itimerval never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &never, NULL);
    if (!strcmp(how, "jump")) leaves_now = 0;
}

static __attribute__((noinline)) void deeper(int depth) {
    volatile char room[64];
    room[0] = depth;
    void *at;
    if (depth > 0) deeper(depth - 1);
    else for (int i = 0; i < 1000; i++) cudaMalloc(&at, 7777);
    room[1] = room[0];
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    how = argv[1];
    count = atoi(argv[2]);
    void *at, *result;
    cudaMalloc(&at, 1);
    if (!strcmp(how, "jump") || !strcmp(how, "alarm")) {
        jumps();
    } else {
        for (int i = 0; i < count; i++) {
            pthread_t id;
            pthread_create(&id, NULL, thread, NULL);
            usleep(i * 7 % 500);
            if (strcmp(how, "exit")) pthread_cancel(id);
            pthread_join(id, &result);
            if (result != (strcmp(how, "exit") ? PTHREAD_CANCELED : (void *)7)) return 3;
        }
        if (cleaned != count) return 4;
    }
    deeper(20);
    puts("ok");
    return 0;
}
