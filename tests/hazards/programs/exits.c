// How a program begins and ends: with closed descriptors, without its main thread, on a small stack.
//
// "main-leaves HOW" leaves the main thread by pthread_exit; HOW is "alone", "worker", "detached" (which makes another one) or
// "cancelled". Its exit handler prints "handler".
// "closed FILE" has made calls when it uses descriptors 0, 1 and 2, which may be closed; what came of it goes into FILE.
// "polled" asks all the time whether descriptor 0 is there, while snapshots are written; fails if it often is.
// "scribble FROM 0 TEXT" writes text over its own black box.
// "small WHERE BYTES WHAT" ends, forks or takes a snapshot on a stack of so many bytes: a thread's, a fiber's, a signal's.
// "heap BYTES" makes calls and takes snapshots on two fibers whose stacks are from the heap.
// "long LIBRARY BYTES" is called by the functions of a library, then exits on a thread with a stack of so many bytes.
// "threads" says how many threads it can make, after calls.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include "cuda.h"

static const char *what;

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    _exit(9);
}

static void take(int blocks) {
    void *at;
    for (int i = 0; i < blocks; i++)
        if (cudaMalloc(&at, 100) != 0) fail("cudaMalloc failed");
}

static int dumped(void) {
    int (*dump)(const char *) = (int (*)(const char *))dlsym(RTLD_DEFAULT, "memtrace_dump");
    return dump == NULL || dump(NULL) == 0;
}

static void snapshot(void) {
    if (!dumped()) fail("no snapshot");
}

// --- the main thread leaves ---------------------------------------------------------------------------------------------

static void handler(void) { puts("handler"); }

static void *late(void *unused) {
    (void)unused;
    usleep(150000);
    take(10);
    return NULL;
}

static void start(void *(*work)(void *), void *argument) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, argument) != 0) fail("no thread");
    pthread_detach(thread);
}

static void *work(void *unused) {
    (void)unused;
    usleep(50000);
    take(10);
    start(late, NULL);
    return NULL;
}

static void *cancel(void *main) {
    usleep(50000);
    pthread_cancel(*(pthread_t *)main);
    return late(NULL);
}

static void main_leaves(const char *how) {
    static pthread_t self;
    self = pthread_self();
    atexit(handler);
    take(10);
    if (strcmp(how, "worker") == 0) start(late, NULL);
    if (strcmp(how, "detached") == 0) start(work, NULL);
    if (strcmp(how, "cancelled") == 0) {
        start(cancel, &self);
        for (;;) pause();
    }
    pthread_exit(NULL);
}

// --- descriptors ------------------------------------------------------------------------------------------------------------

static void closed(const char *path) {
    char said[200], byte;
    take(1000);
    usleep(100000); // the background thread has looked around
    snapshot();
    int in = read(0, &byte, 1) < 0 ? errno : 0, out = write(1, "o", 1) < 0 ? errno : 0, err = write(2, "e", 1) < 0 ? errno : 0;
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    int length = snprintf(said, sizeof said, "read %d write %d %d open %d\n", in, out, err, file);
    if (write(file, said, length) != length) _exit(9);
    // The first file of the program's may be its standard output or error now: no line of anybody else's belongs there.
    snapshot();
    for (int i = 0; i < 100000; i++) printf("line %d of the program's output\n", i);
    take(1000);
    exit(5);
}

static volatile int done;
static long polls, there;

static void *poll_input(void *unused) {
    (void)unused;
    while (!done) {
        polls++;
        there += fcntl(0, F_GETFD) >= 0;
    }
    return NULL;
}

static void polled(void) {
    close(0);
    take(20000);
    pthread_t thread;
    pthread_create(&thread, NULL, poll_input, NULL);
    for (int i = 0; i < 5; i++) snapshot();
    done = 1;
    pthread_join(thread, NULL);
    printf("%ld of %ld\n", there, polls);
    if (there > polls / 5) fail("descriptor 0 is in use");
}

static void scribble(long from) {
    take(5000);
    usleep(100000);
    char line[600], path[600] = "";
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps))
        if (strstr(line, ".blackbox")) sscanf(strchr(line, '/'), "%599s", path);
    fclose(maps);
    int file = open(path[0] ? path : "/dev/null", O_WRONLY); // no black box without memtrace
    if (file < 0) fail("it can't be opened");
    lseek(file, from, SEEK_SET);
    for (int i = 0; i < 60000; i++) dprintf(file, "%d %s\n", i, what);
    close(file);
    take(100000);
    dumped(); // or not
    exit(5);
}

// --- small stacks -----------------------------------------------------------------------------------------------------------

static void act(void) {
    take(20);
    if (strcmp(what, "exit") == 0) exit(5);
    if (strcmp(what, "_exit") == 0) _exit(5);
    if (strcmp(what, "dump") == 0) snapshot();
    if (strcmp(what, "fork") == 0) {
        pid_t child = fork();
        if (child == 0) {
            take(1);
            _exit(3);
        }
        int status;
        if (waitpid(child, &status, 0) != child || status != 3 << 8) fail("the child failed");
    }
}

static void *on_thread(void *unused) {
    act();
    return unused;
}

static void on_signal(int signal) {
    (void)signal;
    act();
}

static ucontext_t main_context, fibers[2];

static void small(const char *where, size_t size) {
    take(1);
    size_t guard = 65536, room = (size + 4095) & ~4095ul;
    char *memory = mmap(NULL, guard + room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(memory, guard, PROT_NONE);
    char *stack = memory + guard + room - size;
    if (strcmp(where, "thread") == 0) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, size);
        if (pthread_create(&thread, &attributes, on_thread, NULL) != 0) fail("no thread");
        pthread_join(thread, NULL);
    } else if (strcmp(where, "fiber") == 0) {
        getcontext(&fibers[0]);
        fibers[0].uc_stack = (stack_t){.ss_sp = stack, .ss_size = size};
        fibers[0].uc_link = &main_context;
        makecontext(&fibers[0], act, 0);
        swapcontext(&main_context, &fibers[0]);
    } else {
        stack_t other = {.ss_sp = stack, .ss_size = size};
        struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_ONSTACK};
        if (sigaltstack(&other, NULL) != 0) fail("no stack for signals");
        sigaction(SIGSEGV, &action, NULL);
        if (strcmp(where, "crash") == 0) *(volatile int *)8 = 1;
        raise(SIGSEGV);
    }
    exit(5);
}

static void switching(int own) {
    for (int i = 0; i < 100; i++) {
        take(1);
        if (i % 50 == 0) snapshot();
        swapcontext(&fibers[own], &fibers[1 - own]);
    }
    swapcontext(&fibers[own], &main_context);
}

static void heap(size_t size) {
    take(1);
    for (int i = 0; i < 2; i++) {
        getcontext(&fibers[i]);
        fibers[i].uc_stack = (stack_t){.ss_sp = malloc(size), .ss_size = size};
        makecontext(&fibers[i], (void (*)(void))switching, 1, i);
    }
    swapcontext(&main_context, &fibers[0]);
    for (int i = 0; i < 1000; i++) free(malloc(i * 100));
    exit(5);
}

static void call(void) { take(1); }

static void *leave(void *unused) {
    (void)unused;
    exit(5);
}

static void long_names(const char *path, size_t size) {
    void *library = dlopen(path, RTLD_NOW);
    if (library == NULL) fail(dlerror());
    for (int i = 0;; i++) {
        char name[16];
        snprintf(name, sizeof name, "e%d", i);
        void (*function)(void (*)(void)) = (void (*)(void (*)(void)))dlsym(library, name);
        if (function == NULL) break;
        function(call);
    }
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, size);
    if (pthread_create(&thread, &attributes, leave, NULL) != 0) fail("no thread");
    pthread_join(thread, NULL);
}

static void *nothing(void *unused) { return unused; }

static void threads(void) {
    take(1000);
    pthread_t all[100];
    int count = 0;
    while (count < 100 && pthread_create(&all[count], NULL, nothing, NULL) == 0) count++;
    for (int i = 0; i < count; i++) pthread_join(all[i], NULL);
    printf("threads %d\n", count);
}

int main(int argc, char **argv) {
    const char *first = argc > 1 ? argv[1] : "", *second = argc > 2 ? argv[2] : "";
    what = argc > 4 ? argv[4] : "";
    size_t bytes = strtoul(argc > 3 ? argv[3] : second, NULL, 0);
    if (strcmp(first, "main-leaves") == 0) main_leaves(second);
    else if (strcmp(first, "closed") == 0) closed(second);
    else if (strcmp(first, "polled") == 0) polled();
    else if (strcmp(first, "scribble") == 0) scribble(atol(second));
    else if (strcmp(first, "small") == 0) small(second, bytes);
    else if (strcmp(first, "heap") == 0) heap(bytes);
    else if (strcmp(first, "long") == 0) long_names(second, bytes);
    else if (strcmp(first, "threads") == 0) threads();
    else return 8;
    return 0;
}
