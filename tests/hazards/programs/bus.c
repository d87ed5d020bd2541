// SIGBUS: the black box is cut short while four threads record into it, or the program has faults of its own.

#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda.h"

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    _exit(9);
}

static void *take(size_t size) {
    void *at = NULL;
    if (cudaMalloc(&at, size) != 0) fail("cudaMalloc failed");
    return at;
}

static atomic_int stop;
static _Atomic long calls;
static void *work(void *argument) {
    while (!stop) {
        if (cudaFree(take(1000)) != 0) fail("cudaFree failed");
        calls++;
    }
    return argument;
}

// As somebody else would: by its path.
static void cut(off_t length) {
    char line[4096], path[4096] = "";
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps))
        if (strstr(line, ".blackbox")) sscanf(line, "%*s %*s %*s %*s %*s %4095s", path);
    if (maps) fclose(maps);
    if (!*path || truncate(path, length) != 0) fail("no black box could be cut");
}

static void cut_while_recording(off_t length) {
    pthread_t threads[4];
    for (int i = 0; i < 50; i++) take(1000);
    for (int i = 0; i < 4; i++)
        if (pthread_create(&threads[i], NULL, work, NULL)) fail("pthread_create");
    while (calls < 1000) usleep(1000);
    cut(length);
    long before = calls;
    usleep(300000);
    stop = 1;
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    if (calls < before + 100) fail("nothing went on");
    take(7777);
}

// In a handler that runs on a stack for signals, which ours must not begin anew.
static void cut_in_handler(int signal) {
    (void)signal;
    volatile unsigned long live[64];
    for (int i = 0; i < 64; i++) live[i] = i * 0x0101010101010101;
    take(1000);
    cut(0);
    for (int i = 0; i < 5; i++) take(1000);
    for (int i = 0; i < 64; i++)
        if (live[i] != i * 0x0101010101010101) fail("the handler's frame was overwritten");
}

static void cut_on_signal_stack(void) {
    stack_t stack = {.ss_size = 64 << 10, .ss_sp = malloc(64 << 10)};
    if (sigaltstack(&stack, NULL) != 0) fail("sigaltstack");
    sigaction(SIGUSR1, &(struct sigaction){.sa_handler = cut_in_handler, .sa_flags = SA_ONSTACK}, NULL);
    take(1000);
    raise(SIGUSR1);
    take(1000);
}

// A page of a file that is no longer as long.
static volatile char *beyond(void) {
    char name[] = "/tmp/memtrace-test-XXXXXX";
    int file = mkstemp(name);
    if (file < 0 || ftruncate(file, 4096) != 0) fail("mkstemp");
    volatile char *at = mmap(NULL, 4096, PROT_READ, MAP_SHARED, file, 0);
    unlink(name);
    if (at == MAP_FAILED || ftruncate(file, 0) != 0) fail("mmap");
    return at;
}

static volatile char *expected;
static sigjmp_buf back;
static volatile int faults, sent;
static void handler(int signal, siginfo_t *info, void *context) {
    (void)context;
    sigset_t blocked;
    sigprocmask(SIG_SETMASK, NULL, &blocked);
    if (signal != SIGBUS || !sigismember(&blocked, SIGUSR1)) _exit(10); // as it asked for below
    if (info->si_code <= 0) {
        sent++;
        return;
    }
    if (info->si_addr != expected) _exit(11);
    faults++;
    siglongjmp(back, 1);
}

static void own_handler(void) {
    struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
    sigaddset(&action.sa_mask, SIGUSR1);
    sigaction(SIGBUS, &action, NULL);
    take(1000);
    expected = beyond();
    for (int i = 0; i < 3; i++)
        if (sigsetjmp(back, 1) == 0) (void)*expected;
    kill(getpid(), SIGBUS);
    cut_while_recording(0);
    if (faults != 3 || sent != 1) fail("its own faults went elsewhere");
}

int main(int argc, char **argv) {
    if (argc < 2) return 8;
    const char *what = argv[1];
    if (!strcmp(what, "cut")) cut_while_recording(atol(argv[2]));
    else if (!strcmp(what, "cut-on-signal-stack")) cut_on_signal_stack();
    else if (!strcmp(what, "cut-at-the-end")) {
        for (int i = 0; i < 50; i++) take(1000);
        cut(atol(argv[2]));
    } else if (!strcmp(what, "own-handler")) own_handler();
    else if (!strcmp(what, "fault")) {
        take(1000);
        (void)*beyond();
    } else if (!strcmp(what, "sent")) {
        take(1000);
        raise(SIGBUS);
    } else if (!strcmp(what, "ignored")) {
        signal(SIGBUS, SIG_IGN);
        take(1000);
        raise(SIGBUS);
    } else if (!strcmp(what, "fault-in-child")) {
        take(1000);
        pid_t child = fork();
        if (child == 0) (void)*beyond();
        int status;
        if (waitpid(child, &status, 0) != child || WTERMSIG(status) != SIGBUS) fail("the child lives");
    } else return 8;
    puts("ok");
    return 5;
}
