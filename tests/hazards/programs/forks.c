// Forks while its other threads are inside memtrace or the loader. Each child does the same as they do and ends.
//
// "forks MODE TIMES FOLDER": says which children did not end within ten seconds, and at what they were. The threads open and
// close labels, use memtrace as PyTorch's allocator, set it and ask it, watch modules, learn operators, call CUDA, look names up,
// and write snapshots into the folder. In mode "loading" they load and unload libraries, too, which glibc lets no
// child do that was forked meanwhile; in mode "looking" it is the children that load libraries.

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda.h"

static const char *folder;

#define FUNCTION(result, name, ...) static result (*name)(__VA_ARGS__);
#define FUNCTIONS(F)                                                                    \
    F(int, memtrace_dump, const char *)                                                 \
    F(int, memtrace_push, const char *)                                                 \
    F(int, memtrace_pop, void)                                                          \
    F(void, memtrace_calls_add, uintptr_t, uint32_t, int, const char *, uint32_t)       \
    F(void, memtrace_calls_remove, uint32_t)                                            \
    F(void, memtrace_operators_learn, const char *)                                     \
    F(void *, memtrace_malloc, size_t, int, uint64_t)                                   \
    F(void, memtrace_free, void *, size_t, int, uint64_t)                               \
    F(void, memtrace_record_stream, void *, uint64_t)                                   \
    F(char *, memtrace_allocator_configure, const char *)                               \
    F(char *, memtrace_allocator_settings, void)                                        \
    F(char *, memtrace_allocator_stats, int)                                            \
    F(char *, memtrace_allocator_segments, uint64_t, uint64_t, int)                     \
    F(void, memtrace_string_free, char *)                                               \
    F(void, memtrace_allocator_observe_oom, void (*)(int64_t, uint64_t, uint64_t, uint64_t))
FUNCTIONS(FUNCTION)

static void find(void) {
#define FIND(result, name, ...)                                             \
    name = (result (*)(__VA_ARGS__))dlsym(RTLD_DEFAULT, #name);             \
    if (name == NULL) { fprintf(stderr, "no %s\n", #name); _exit(9); }
    FUNCTIONS(FIND)
}

static void labels(int n) {
    char name[32];
    snprintf(name, sizeof name, "label %d", n % 100);
    memtrace_push(name);
    memtrace_pop();
}

static void modules(int n) {
    (void)n;
    for (uintptr_t at = 1; at < 64; at++) memtrace_calls_add(at << 8, 7, 1, "a module", 0);
    memtrace_calls_remove(7);
}

static void operators(int n) {
    (void)n;
    memtrace_operators_learn("add_Tensor\taten::add.Tensor\t2\nmul_Tensor\taten::mul.Tensor\t2");
}

// Held while it works: blocks that a child, too, gives back.
static void *volatile kept[64];

static void allocator(int n) {
    void *at = kept[n % 64];
    kept[n % 64] = NULL; // a child must not give it back again
    if (at != NULL) {
        memtrace_record_stream(at, 0);
        memtrace_free(at, 0, 0, 0);
    }
    kept[n % 64] = memtrace_malloc(1 + n % 7 * 300000, 0, 0);
}

static void settings(int n) {
    memtrace_string_free(memtrace_allocator_configure(n % 2 ? "max_split_size_mb:64" : "max_split_size_mb:128"));
    memtrace_string_free(memtrace_allocator_settings());
}

static void questions(int n) {
    (void)n;
    memtrace_string_free(memtrace_allocator_stats(0));
    memtrace_string_free(memtrace_allocator_segments(0, 0, 1));
}

static void observer(int64_t device, uint64_t segment, uint64_t allowed, uint64_t left) {
    (void)device, (void)segment, (void)allowed, (void)left;
}

static void observers(int n) {
    if (n < 20000) memtrace_allocator_observe_oom(observer);
}

static void driver(int n) {
    void *at = NULL;
    if (cudaMalloc(&at, 1 + n % 1000) == 0) cudaFree(at);
}

static void lookups(int n) {
    static const char *const names[] = {"cudaMalloc", "cudaFreeAsync", "cuMemAlloc_v2", "no such function"};
    dlsym(RTLD_DEFAULT, names[n % 4]);
}

static void libraries(int n) {
    void *handle = dlopen(n % 2 ? "libutil.so.1" : "libanl.so.1", RTLD_NOW);
    if (handle != NULL) dlclose(handle);
}

static void snapshots(int n) {
    char path[4096];
    (void)n;
    snprintf(path, sizeof path, "%s/again-%d.pickle", folder, (int)getpid());
    memtrace_dump(path);
}

#define WORK(name) {#name, name}
static const struct {
    const char *name;
    void (*work)(int);
} works[] = {WORK(labels),    WORK(modules), WORK(operators), WORK(allocator), WORK(settings), WORK(questions),
             WORK(observers), WORK(driver),  WORK(lookups),   WORK(libraries), WORK(snapshots)};
enum { WORKS = sizeof works / sizeof works[0], LIBRARIES = 9, SNAPSHOTS = 10 };

static void *work(void *which) {
    for (int n = 0;; n++) works[(intptr_t)which].work(n);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 4) return 8;
    int loading = strcmp(argv[1], "loading") == 0;
    folder = argv[3];
    find();
    driver(0);
    for (intptr_t i = 0; i < WORKS; i++) {
        pthread_t thread;
        if (i != LIBRARIES || loading) pthread_create(&thread, NULL, work, (void *)i);
    }
    int stuck = 0;
    for (int i = 0; i < atoi(argv[2]); i++) {
        usleep(1000 + i * 37 % 2000);
        int said[2];
        if (pipe(said)) return 8;
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            for (char w = 0; w < WORKS; w++) {
                if (w == LIBRARIES && loading) continue;
                if (w == SNAPSHOTS && i % 10 != 0) continue; // they are slow
                if (write(said[1], &w, 1) != 1) _exit(9);
                for (int n = 0; n < 3; n++) works[(int)w].work(n);
            }
            syscall(SYS_exit_group, 0); // the rest is another test's
        }
        close(said[1]);
        int status = 0, looks = 0;
        while (waitpid(child, &status, WNOHANG) == 0) {
            usleep(1000);
            if (++looks == 10000) kill(child, SIGKILL);
        }
        char last = 0, w;
        while (read(said[0], &w, 1) == 1) last = w;
        close(said[0]);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            printf("child %d: %s, status %d\n", i, works[(int)last].name, status);
            if (++stuck == 5) break;
        }
    }
    if (stuck == 0) puts("ok");
    fflush(stdout);
    syscall(SYS_exit_group, 0);
}
