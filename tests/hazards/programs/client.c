// A program that allocates in four threads until it is killed, and says in a file what it holds.
//
// Each thread has slots in the file, which is mapped: the kernel keeps what was stored in it whatever happens to the
// process. Before a call the slot says what is about to happen, after it what has. So at any moment all slots
// that say LIVE are live, those that say EMPTY are not, and at most one slot of each thread is in between.
//
// Arguments: the file, and how to end: "run" (until killed), or as many milliseconds after the first call as the third
// argument says "segv", "abort", "exit", "_exit"; or in the middle of a snapshot that it asks for: "signal" (by a system call
// that nobody hooks), "signal-exit", "signal-segv", "signal-kill".

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda.h"

enum { THREADS = 4, SLOTS = 256 };
enum { EMPTY, ALLOCATING, LIVE, FREEING };

struct slot {
    _Atomic uint64_t state, addr, size;
};
struct thread {
    _Atomic uint64_t done; // calls that have returned
    struct slot slots[SLOTS];
};
static struct thread *threads;

static void *work(void *argument) {
    struct thread *self = argument;
    uint64_t random = 0x9e3779b97f4a7c15ull * (uint64_t)(self - threads + 1) + (uint64_t)getpid();
    for (;;) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        struct slot *slot = &self->slots[random % SLOTS];
        if (slot->state == EMPTY) {
            void *at = NULL;
            slot->addr = 0;
            slot->size = (random >> 20) % 4000 + 1;
            slot->state = ALLOCATING;
            if (cudaMalloc(&at, slot->size) != 0) {
                fprintf(stderr, "cudaMalloc failed\n");
                _exit(9);
            }
            slot->addr = (uint64_t)at;
            slot->state = LIVE;
        } else {
            slot->state = FREEING;
            if (cudaFree((void *)slot->addr) != 0) {
                fprintf(stderr, "cudaFree failed\n");
                _exit(9);
            }
            slot->state = EMPTY;
        }
        self->done++;
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 3) return 8;
    int file = open(argv[1], O_RDWR | O_CREAT, 0600);
    size_t length = THREADS * sizeof(struct thread);
    if (file < 0 || ftruncate(file, (off_t)length) != 0) return 8;
    threads = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (threads == MAP_FAILED) return 8;
    for (int i = 0; i < THREADS; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, &threads[i]) != 0) return 8;
    }
    while (argc > 3 && threads[0].done == 0) usleep(100);
    if (argc > 3) usleep(1000 * (useconds_t)atoi(argv[3]));
    const char *end = argv[2];
    if (strcmp(end, "run") == 0) pause();
    if (strncmp(end, "signal", 6) == 0) {
        raise(SIGUSR2);
        usleep(1000 * (useconds_t)(getpid() % 20));
        if (strcmp(end, "signal") == 0) syscall(SYS_exit_group, 3); // no handler of anybody's runs
        if (strcmp(end, "signal-kill") == 0) raise(SIGKILL);
        end += strlen("signal-");
    }
    if (strcmp(end, "segv") == 0) *(volatile int *)8 = 1;
    if (strcmp(end, "abort") == 0) abort();
    if (strcmp(end, "_exit") == 0) _exit(3);
    exit(3);
}
