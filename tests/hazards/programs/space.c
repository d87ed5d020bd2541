// What a program notices of a recorder that is in trouble: nothing. Each call of CUDA's leaves `errno` as it is.
//
// "calls HOW CALLS": something is taken away first, or after the first call: "closed", "jail" (another root folder), "both",
// "memory" (no more address space), "stderr", "none". "small" says how many files ending in .blackbox are mapped, and isn't strict.
// "start": starts programs with addresses where nothing is.
// "elsewhere FOLDER": a child makes this its root folder, and starts a program that isn't there.
// "fork FOLDER": forks while another thread writes snapshots; the child allocates, and ends.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda.h"

extern char **environ;

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    _exit(9);
}

static int is_strict; // about `errno`

static void *take(size_t size) {
    void *at = NULL;
    errno = 77;
    if (cudaMalloc(&at, size) != 0) fail("cudaMalloc failed");
    if (is_strict && errno != 77) {
        fprintf(stderr, "errno is %d\n", errno);
        _exit(9);
    }
    return at;
}

static void *other(void *unused) {
    (void)unused;
    take(3);
    return NULL;
}

static void count_mapped(void) {
    char line[4096];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) count += strstr(line, ".blackbox") != NULL;
    printf("mapped %d\n", count);
}

static void calls(const char *how, long n) {
    is_strict = strcmp(how, "small") != 0;
    if (strcmp(how, "first-memory") != 0) take(1);
    if (!is_strict) count_mapped();
    usleep(20000);
    if (strcmp(how, "closed") == 0 || strcmp(how, "both") == 0) syscall(SYS_close_range, 3, ~0u, 0);
    if (strcmp(how, "jail") == 0 || strcmp(how, "both") == 0) {
        if (mkdir("jail", 0755) || chroot("jail") || chdir("/")) fail("no jail");
    }
    if (strstr(how, "memory") != NULL) {
        struct rlimit none = {1, RLIM_INFINITY};
        setrlimit(RLIMIT_AS, &none);
        for (int i = 0; i < 100000 && malloc(512) != NULL; i++) {}
        for (long i = 0; i < n; i++) take(100);
        struct rlimit all = {RLIM_INFINITY, RLIM_INFINITY};
        setrlimit(RLIMIT_AS, &all);
    }
    if (strcmp(how, "stderr") == 0) close(2);
    for (long i = 0; i < n; i++) take(100);
    pthread_t thread;
    if (pthread_create(&thread, NULL, other, NULL) == 0) pthread_join(thread, NULL);
}

static void expect(const char *what, int is) {
    if (!is) fail(what);
}

static void start(void) {
    static char *volatile nowhere = (char *)8;
    char *bad = nowhere, *path = "/bin/true", *none[] = {path, NULL};
    char *word[] = {path, bad, NULL}, *clean[] = {"A=b", NULL};
    char **lists[] = {(char **)bad, word, (char **)(bad - 16)};
    expect("the path", execve(bad, none, clean) == -1 && errno == EFAULT);
    expect("the path, and an own environment", execv(bad - 9, none) == -1 && errno == EFAULT);
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        expect("the words", execve(path, lists[i], clean) == -1 && errno == EFAULT);
        expect("the environment", execve(path, none, lists[i]) == -1 && errno == EFAULT);
    }
    expect("fexecve", fexecve(0, lists[0], clean) == -1);
    // A list without an end runs into memory that isn't there.
    size_t page = 4096;
    char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(pages + page, page, PROT_NONE);
    char **endless = (char **)(pages + page) - 2;
    endless[0] = endless[1] = path;
    expect("an endless list", execve(path, endless, clean) == -1 && errno == EFAULT);
    char *text = pages + page - 4;
    memcpy(text, "abcd", 4);
    char *cut[] = {text, NULL};
    expect("an endless string", execve(path, cut, clean) == -1 && errno == EFAULT);
    // What does start leaves errno alone.
    pid_t child;
    int status;
    errno = 77;
    expect("posix_spawn", posix_spawn(&child, path, NULL, NULL, none, clean) == 0 && errno == 77);
    waitpid(child, &status, 0);
}

static void *dump(void *folder) {
    int (*write)(const char *) = (int (*)(const char *))dlsym(RTLD_DEFAULT, "memtrace_dump");
    char path[4096];
    snprintf(path, sizeof path, "%s/again.pickle", (char *)folder);
    for (;;) {
        if (write == NULL || write(path) != 0) fail("no snapshot");
    }
    return NULL;
}

static void forked(char *folder) {
    for (int i = 0; i < 100000; i++) take(100);
    pthread_t thread;
    pthread_create(&thread, NULL, dump, folder);
    for (int i = 0; i < 5; i++) {
        usleep(100000);
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            take(7);
            exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        expect("the child ends", WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    puts("ok");
    fflush(stdout);
    syscall(SYS_exit_group, 0);
}

static void elsewhere(const char *folder) {
    char *none[] = {"nothing", NULL}, *clean[] = {"A=b", NULL};
    pid_t child = fork();
    if (child == 0) {
        if (chroot(folder) || chdir("/")) fail("no jail");
        expect("nothing is there", execvpe("nothing", none, clean) == -1 && errno == ENOENT);
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    expect("the child", WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char **argv) {
    if (argc < 2) return 8;
    if (strcmp(argv[1], "calls") == 0 && argc > 3) calls(argv[2], atol(argv[3]));
    else if (strcmp(argv[1], "start") == 0) start();
    else if (strcmp(argv[1], "elsewhere") == 0 && argc > 2) elsewhere(argv[2]);
    else if (strcmp(argv[1], "fork") == 0 && argc > 2) forked(argv[2]);
    else return 8;
    puts("ok");
    return 0;
}
