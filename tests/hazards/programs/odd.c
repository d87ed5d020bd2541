// One odd thing for each first argument; every one prints "ok" if it went as it should.

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
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

static void give(void *at) {
    if (cudaFree(at) != 0) fail("cudaFree failed");
}

static void reap(pid_t child) {
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) fail("the child failed");
}

// The child is the first to use CUDA.
static void fork_child_first(void) {
    pid_t child = fork();
    if (child == 0) {
        take(1111);
        exit(0);
    }
    reap(child);
    take(2222);
}

// The parent has used it before: CUDA itself refuses to work in the child then.
static void fork_parent_first(void) {
    take(2222);
    pid_t child = fork();
    if (child == 0) {
        void *at;
        exit(cudaMalloc(&at, 1111) == 0);
    }
    reap(child);
    take(4444);
}

// A process that becomes another program keeps its number.
static void exec_same(char **argv) {
    take(1111);
    char *next[] = {argv[0], "plain", NULL};
    execv("/proc/self/exe", next);
    fail("execv");
}

static void *forever(void *argument) {
    (void)argument;
    for (;;) {
        void *at = take(1000);
        give(at);
        pthread_testcancel();
    }
    return NULL;
}

// Threads that are cancelled between their calls, and threads that simply end.
static void *one(void *argument) {
    give(take(100));
    return argument;
}

static void cancel(void) {
    for (int i = 0; i < 200; i++) {
        pthread_t a, b;
        if (pthread_create(&a, NULL, forever, NULL) || pthread_create(&b, NULL, one, NULL)) fail("pthread_create");
        usleep(100);
        pthread_cancel(a);
        pthread_join(a, NULL);
        pthread_join(b, NULL);
    }
    take(7777);
}

static void at_thread_exit(void *argument) {
    give(argument);
}

// A thread-specific destructor that calls CUDA while the thread is taken apart.
static pthread_key_t key;
static void *with_destructor(void *argument) {
    pthread_setspecific(key, take(500));
    return argument;
}

static void destructors(void) {
    pthread_key_create(&key, at_thread_exit);
    for (int i = 0; i < 100; i++) {
        pthread_t a;
        if (pthread_create(&a, NULL, with_destructor, NULL)) fail("pthread_create");
        pthread_join(a, NULL);
    }
    take(7777);
}

static void *leave(void *argument) {
    take(7777);
    puts("ok");
    exit(4);
    return argument;
}

static void exit_in_thread(void) {
    pthread_t a;
    if (pthread_create(&a, NULL, leave, NULL)) fail("pthread_create");
    pause();
}

static void on_exit_too(void) {
    give(take(5555));
}

// Handlers of the program's own that run before and after ours.
static void exit_handlers(void) {
    atexit(on_exit_too);
    take(7777);
    atexit(on_exit_too);
}

// Many pairs: the recorder's memory stays as it is.
static long resident(void) {
    long pages = 0, all = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%ld %ld", &all, &pages) != 2) fail("statm");
    fclose(f);
    return pages * 4;
}

static void pairs(long count) {
    for (int i = 0; i < 200000; i++) give(take(1000));
    long before = resident();
    for (long i = 0; i < count; i++) give(take(1000));
    printf("grew %ld KiB\n", resident() - before);
}

static double pair_ns(void) {
    struct timespec a, b;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
    for (int i = 0; i < 20000; i++) give(take(1000));
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
    return ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / 20000;
}

static void *timed(void *argument) {
    *(double *)argument = pair_ns();
    return NULL;
}

// The main thread has a stack whose bounds are dear to ask for.
static void main_thread(void) {
    double worker = 0;
    pthread_t a;
    give(take(1));
    if (pthread_create(&a, NULL, timed, &worker)) fail("pthread_create");
    pthread_join(a, NULL);
    printf("main %.0f worker %.0f\n", pair_ns(), worker);
}

// Takes all descriptors away and opens another file in their place.
static void close_all(const char *path) {
    take(1111);
    for (int i = 3; i < 64; i++) close(i);
    int files[8];
    for (int i = 0; i < 8; i++) files[i] = open(path, O_RDWR | O_CREAT, 0600);
    for (int i = 0; i < 100000; i++) give(take(10));
    printf("its length is %ld\n", (long)lseek(files[7], 0, SEEK_END));
}

// Blocks from before the history that is kept, one of which is freed at last.
static void old_blocks(void) {
    void *old = take(123456);
    for (int i = 0; i < 100; i++) take(1000);
    for (int i = 0; i < 5000; i++) give(take(10));
    give(old);
}

static void late(const char *library) {
    void *handle = dlopen(library, RTLD_NOW);
    if (!handle) fail(dlerror());
    int (*active)(void) = (int (*)(void))dlsym(handle, "memtrace_active");
    int (*dump)(const char *) = (int (*)(const char *))dlsym(handle, "memtrace_dump");
    if (!active || !dump || active() != 0 || dump(NULL) != 1) fail("asleep");
    give(take(1000));
    dlclose(handle);
    give(take(1000));
}

static void constructor(const char *library) {
    if (!dlopen(library, RTLD_NOW)) fail(dlerror());
    take(7777);
}

// A child that has our memory until it ends, and one that a library starts that way.
static void borrowed_memory(void) {
    take(1111);
    for (int i = 0; i < 20; i++) {
        pid_t child = vfork();
        if (child == 0) _exit(0);
        reap(child);
    }
    char *command[] = {"true", NULL};
    pid_t child;
    if (posix_spawnp(&child, "true", NULL, NULL, command, environ) != 0) fail("posix_spawnp");
    reap(child);
    if (system("true") != 0) fail("system");
    take(2222);
}

// Retained twice and released once, a context lives; a child begins with none.
static void primary_context(void) {
    CUcontext context = NULL, again = NULL;
    unsigned flags;
    int active = 0;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuDevicePrimaryCtxRetain(&again, 0)) fail("retain");
    if (context != again || cuDevicePrimaryCtxRelease_v2(0)) fail("release");
    if (cuDevicePrimaryCtxGetState(0, &flags, &active) || !active) fail("it ended with one of two");
    if (cuCtxSetCurrent(context)) fail("current");
    take(2222);
    pid_t child = fork();
    if (child == 0) {
        void *at;
        exit(cudaMalloc(&at, 1111) == 0);
    }
    reap(child);
    take(4444);
    if (cuDevicePrimaryCtxGetState(0, &flags, &active) || !active) fail("the child has ended it");
}

static int entries(const char *path) {
    DIR *folder = opendir(path);
    int n = 0;
    while (folder && readdir(folder)) n++;
    if (folder) closedir(folder);
    return n;
}

// What is there before the first call, and after it.
static void asleep(void) {
    printf("threads %d files %d\n", entries("/proc/self/task") - 2, entries("/proc/self/fd") - 3);
    take(7777);
    // NVML is opened by a thread of its own, which ends at once.
    for (int i = 0; i < 5000 && entries("/proc/self/task") - 2 > 2; i++) usleep(1000);
    printf("threads %d files %d\n", entries("/proc/self/task") - 2, entries("/proc/self/fd") - 3);
}

// Calls everything in a library that was made for it, then asks for a snapshot and tells how long that took.
static void many_sites(const char *library) {
    void *handle = dlopen(library, RTLD_NOW);
    void (*all)(void) = handle ? (void (*)(void))dlsym(handle, "all") : NULL;
    int (*dump)(const char *) = (int (*)(const char *))dlsym(RTLD_DEFAULT, "memtrace_dump");
    if (!all || !dump) fail("many_sites");
    all();
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    if (dump(NULL) != 0) fail("memtrace_dump");
    clock_gettime(CLOCK_MONOTONIC, &b);
    printf("dump %.0f ms\n", (double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) / 1e6);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    const char *more = argc > 2 ? argv[2] : "";
    if (!strcmp(what, "plain")) take(7777);
    else if (!strcmp(what, "fork_child_first")) fork_child_first();
    else if (!strcmp(what, "fork_parent_first")) fork_parent_first();
    else if (!strcmp(what, "exec")) exec_same(argv);
    else if (!strcmp(what, "cancel")) cancel();
    else if (!strcmp(what, "destructors")) destructors();
    else if (!strcmp(what, "exit_in_thread")) exit_in_thread();
    else if (!strcmp(what, "exit_handlers")) exit_handlers();
    else if (!strcmp(what, "pairs")) pairs(atol(more));
    else if (!strcmp(what, "main_thread")) main_thread();
    else if (!strcmp(what, "close_all")) close_all(more);
    else if (!strcmp(what, "old_blocks")) old_blocks();
    else if (!strcmp(what, "late")) late(more);
    else if (!strcmp(what, "borrowed_memory")) borrowed_memory();
    else if (!strcmp(what, "primary_context")) primary_context();
    else if (!strcmp(what, "asleep")) asleep();
    else if (!strcmp(what, "many_sites")) many_sites(more);
    else if (!strcmp(what, "constructor")) constructor(more);
    else fail("unknown");
    puts("ok");
    return 0;
}
