// Allocates on a stack, or in a chain of calls, that a tracer can't walk as usual. Every one prints "ok" and how many calls it made.
// stacks WHAT [NUMBER [LIBRARY]]
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "cuda.h"

enum { PAGE = 4096 };

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    _exit(9);
}

static volatile long calls;

// Takes little of the stack itself.
__attribute__((noinline)) static void allocate(void) {
    void *at = NULL;
    if (cudaMalloc(&at, 1000) != 0 || at == NULL || cudaFree(at) != 0) _exit(9);
    calls++;
}

static char *pages(size_t n, int protection) {
    char *at = mmap(NULL, n * PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) fail("mmap");
    return at;
}

// So many bytes between two pages that nobody can touch.
static char *between_guards(size_t size) {
    size_t n = (size + PAGE - 1) / PAGE;
    char *at = pages(n + 2, PROT_NONE);
    if (mprotect(at + PAGE, n * PAGE, PROT_READ | PROT_WRITE) != 0) fail("mprotect");
    return at + PAGE + n * PAGE - size; // the upper end is at the page's
}

// --- generated code ------------------------------------------------------------------------------------

typedef void (*Call)(void (*)(void));

static char *code; // the page that it is in
static int code_ends; // it is the last thing before an unreadable page

static Call generate(const unsigned char *bytes, size_t size) {
    code = pages(2, PROT_READ | PROT_WRITE | PROT_EXEC);
    char *at = code_ends ? code + PAGE - size : code + 64;
    memcpy(at, bytes, size);
    if (mprotect(code + PAGE, PAGE, PROT_NONE) != 0) fail("mprotect");
    return (Call)at;
}

static const unsigned char WITH_FP[] = {0x55, 0x48, 0x89, 0xe5, 0xff, 0xd7, 0x5d, 0xc3};
static const unsigned char WITHOUT_FP[] = {0x48, 0x83, 0xec, 0x08, 0xff, 0xd7, 0x48, 0x83, 0xc4, 0x08, 0xc3};
// The frame pointer is this number.
static const unsigned char FP_IS[] = {0x55, 0x48, 0xbd, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xd7, 0x5d, 0xc3};
// It never comes back to the call: the return address is the first of the next page.
static const unsigned char LAST[] = {0x48, 0x83, 0xec, 0x08, 0xff, 0xd7};

static void frame_pointer(uintptr_t value) {
    unsigned char bytes[sizeof FP_IS];
    memcpy(bytes, FP_IS, sizeof bytes);
    memcpy(bytes + 3, &value, 8);
    Call f = generate(bytes, sizeof bytes);
    for (int i = 0; i < 20; i++) f(allocate);
}

static void from_code(const unsigned char *bytes, size_t size) {
    Call f = generate(bytes, size);
    for (int i = 0; i < 20; i++) f(allocate);
}

static void without_code(void) {
    char save[PAGE];
    memcpy(save, code, PAGE);
    munmap(code, PAGE);
    allocate();
    allocate();
    if (mmap(code, PAGE, 7, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != code) fail("mmap");
    memcpy(code, save, PAGE);
}

static void without_access(void) {
    mprotect(code, PAGE, PROT_EXEC);
    allocate();
    mprotect(code, PAGE, PROT_NONE);
    allocate();
    mprotect(code, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC);
}

static sigjmp_buf back;
static void and_jump(void) {
    allocate();
    siglongjmp(back, 1);
}

static void last_of_page(void) {
    code_ends = 1;
    Call f = generate(LAST, sizeof LAST);
    for (int i = 0; i < 20; i++)
        if (sigsetjmp(back, 0) == 0) f(and_jump);
}

// --- tables that were registered -----------------------------------------------------------------------

static void (*add_tables)(void *), (*take_tables)(void *);

static void find_registry(void) {
    add_tables = (void (*)(void *))dlsym(RTLD_DEFAULT, "__register_frame");
    take_tables = (void (*)(void *))dlsym(RTLD_DEFAULT, "__deregister_frame");
    if (add_tables == NULL || take_tables == NULL) fail("no libgcc");
}

enum { TABLES_SIZE = 68 };

// Tables of one function: from where, how long, and that its frame has 16 bytes throughout.
static void write_tables(unsigned char *to, Call f) {
    static const unsigned char TABLES[TABLES_SIZE] = {
        0x14, 0, 0, 0, 0, 0, 0, 0, 1, 'z', 'R', 0, 1, 0x78, 0x10, 1, 0, 0x0c, 7, 8, 0x90, 1, 0, 0,
        0x24, 0, 0, 0, 0x1c, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0x0e, 16};
    memcpy(to, TABLES, sizeof TABLES);
    memcpy(to + 32, &f, 8);
}

// The code goes, and its tables with it.
static void registered(int gone) {
    find_registry();
    Call f = generate(WITHOUT_FP, sizeof WITHOUT_FP);
    unsigned char *tables = (unsigned char *)code + 2048;
    write_tables(tables, f);
    add_tables(tables);
    for (int i = 0; i < 20; i++) f(allocate);
    if (gone) {
        f(without_code);
        f(without_access);
    }
    take_tables(tables);
    if (!gone) f(allocate); // by now nobody knows it
}

// Somebody else's tables change or go once they are registered, while code without any is on the stack.
static void registered_then_changed(void) {
    static const struct {
        int at;
        unsigned value;
    } CHANGES[] = {{16, 0x07080c0e}, {0, 0x7ffffff0}, {28, 0x70000000}, {24, 0x7fffffe0}, {64, 0xffffff00}, {4, 1}};
    enum { COUNT = sizeof CHANGES / sizeof *CHANGES };
    find_registry();
    Call with = generate(WITHOUT_FP, sizeof WITHOUT_FP), without = generate(WITHOUT_FP, sizeof WITHOUT_FP);
    for (int i = 0; i < COUNT + 2; i++) {
        char *page = between_guards(PAGE);
        unsigned char *tables = (unsigned char *)page + PAGE - TABLES_SIZE;
        write_tables(tables, with);
        add_tables(tables);
        if (i < COUNT) memcpy(tables + CHANGES[i].at, &CHANGES[i].value, 4);
        else if (mprotect(page, PAGE, PROT_NONE) != 0 || (i > COUNT && munmap(page, PAGE) != 0)) fail("the page stays");
        without(allocate);
        with(allocate);
        without(allocate);
        int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
        if (i >= COUNT && mmap(page, PAGE, PROT_READ | PROT_WRITE, kind, -1, 0) != page) fail("mmap");
        write_tables(tables, with);
        take_tables(tables);
    }
}

// A handler comes while the C runtime has its list locked.
static Call undescribed;
static volatile long interruptions;
static void interrupt(int signal) {
    (void)signal;
    interruptions++;
    undescribed(allocate);
}

static void registering(void) {
    find_registry();
    undescribed = generate(WITHOUT_FP, sizeof WITHOUT_FP);
    static unsigned char tables[TABLES_SIZE];
    write_tables(tables, undescribed + PAGE);
    signal(SIGALRM, interrupt);
    struct itimerval often = {.it_interval.tv_usec = 200, .it_value.tv_usec = 200};
    setitimer(ITIMER_REAL, &often, NULL);
    while (interruptions < 500) {
        add_tables(tables);
        take_tables(tables);
    }
    setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);
}

// --- tables that are wrong -----------------------------------------------------------------------------

// A push that the table doesn't know.
void pushing(void (*)(void));
// The caller's frame is where the frame pointer says, which is the second argument.
void following(void (*)(void), void *);
// The frame is the caller's of the register, whatever it is; and the return address is nowhere.
__asm__(
    ".text\n.type pushing, @function\npushing:\n.cfi_startproc\n"
    "push $5\ncall *%rdi\nadd $8, %rsp\nret\n.cfi_endproc\n.size pushing, .-pushing\n"
    ".type following, @function\nfollowing:\n.cfi_startproc\n"
    "push %rbp\n.cfi_def_cfa_offset 16\n.cfi_offset rbp, -16\n"
    "mov %rsi, %rbp\n.cfi_def_cfa rbp, 8\n"
    "call *%rdi\n"
    "pop %rbp\n.cfi_def_cfa rsp, 8\nret\n.cfi_endproc\n.size following, .-following\n");

// Calls itself so many times, and then the function. Most of its caller's registers are, says its table, what an endless loop
// comes to.
void looping(void (*)(void), long);
#define ENDLESS(register) ".cfi_escape 0x16, " #register ", 3, 0x2f, 0xfd, 0xff\n"
__asm__(
    ".text\n.type looping, @function\nlooping:\n.cfi_startproc\npush %rbx\n.cfi_def_cfa_offset 16\n"
    ENDLESS(0) ENDLESS(1) ENDLESS(2) ENDLESS(3) ENDLESS(4) ENDLESS(5) ENDLESS(6) ENDLESS(8) ENDLESS(9) ENDLESS(10)
    ENDLESS(11) ENDLESS(12) ENDLESS(13) ENDLESS(14) ENDLESS(15)
    "test %rsi, %rsi\njz 1f\ndec %rsi\ncall looping\njmp 2f\n"
    "1: call *%rdi\n"
    "2: pop %rbx\n.cfi_def_cfa_offset 8\nret\n.cfi_endproc\n.size looping, .-looping\n");

static void astray(void) {
    char *guard = pages(1, PROT_NONE), *last = between_guards(PAGE) + PAGE - 8;
    void *places[] = {NULL, (void *)1, guard, guard - 4, last, last + 1, last + 8, (void *)-1, (void *)-8,
                      (void *)0x800000000000, (void *)(1ul << 63), &places, (char *)&places + (1 << 20)};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        for (int j = 0; j < 3; j++) following(allocate, places[i]);
}

// --- stacks --------------------------------------------------------------------------------------------

static ucontext_t outside, inside;

static void fiber(void) {
    for (int i = 0; i < 3; i++) {
        allocate();
        swapcontext(&inside, &outside);
    }
    allocate();
}

static void run_fiber(char *stack, size_t size) {
    getcontext(&inside);
    inside.uc_stack.ss_sp = stack;
    inside.uc_stack.ss_size = size;
    inside.uc_link = &outside;
    makecontext(&inside, fiber, 0);
    for (int i = 0; i < 4; i++) swapcontext(&outside, &inside);
}

// Where the heap grows to after the first call.
static void grow_heap(void) {
    for (int i = 0; i < 100; i++)
        if (malloc(100 << 10) == NULL) fail("malloc");
}

// The bytes around a stack that nobody protects, and how many of its own were used.
static size_t painted_fiber(size_t size) {
    enum { AROUND = 4096 };
    unsigned char *all = malloc(size + 2 * AROUND);
    memset(all, 0xa5, size + 2 * AROUND);
    run_fiber((char *)all + AROUND, size);
    size_t untouched = 0;
    while (untouched < size + AROUND && all[untouched] == 0xa5) untouched++;
    if (untouched < AROUND) fail("a stack overflowed");
    free(all);
    return size + AROUND - untouched;
}

static void *on_thread(void *unused) {
    for (int i = 0; i < 20; i++) allocate();
    return unused;
}

static void thread(size_t size, char *stack) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    if ((stack ? pthread_attr_setstack(&attributes, stack, size) : pthread_attr_setstacksize(&attributes, size)) != 0)
        fail("the size is refused");
    pthread_t id;
    if (pthread_create(&id, &attributes, on_thread, NULL) != 0) fail("no thread");
    pthread_join(id, NULL);
}

static void handler(int signal) {
    (void)signal;
    allocate();
}

static void alternate(size_t size) {
    stack_t stack = {.ss_sp = between_guards(size), .ss_size = size};
    if (sigaltstack(&stack, NULL) != 0) fail("the size is refused");
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_ONSTACK};
    sigaction(SIGUSR1, &action, NULL);
    for (int i = 0; i < 20; i++) raise(SIGUSR1);
}

// A handler that returns to two instructions which nobody has described.
static void own_restorer(int with_code) {
    static const unsigned char RETURN[] = {0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05};
    code_ends = 1;
    struct {
        void (*handler)(int);
        unsigned long flags;
        void (*restorer)(void);
        unsigned long mask;
    } action = {handler, 0x04000000, (void (*)(void))generate(RETURN, sizeof RETURN), 0};
    if (!with_code) mprotect(code, PAGE, PROT_EXEC);
    if (syscall(SYS_rt_sigaction, SIGUSR1, &action, NULL, 8) != 0) fail("rt_sigaction");
    for (int i = 0; i < 20; i++) raise(SIGUSR1);
}

// --- libraries -----------------------------------------------------------------------------------------

typedef void (*Chain)(const unsigned char *kinds, int count, void (*then)(void));
static char *first_page;

// While functions of the library are on the stack.
static void without_tables(void) {
    allocate();
    mprotect(first_page, PAGE, PROT_NONE);
    allocate();
    // What is loaded is looked at again.
    void *other = dlopen("libutil.so.1", RTLD_NOW);
    allocate();
    if (other != NULL) dlclose(other);
    allocate();
    munmap(first_page, PAGE);
    allocate();
}

static void library(const char *path) {
    void *handle = dlopen(path, RTLD_NOW);
    Chain call = handle ? (Chain)dlsym(handle, "call") : NULL;
    Dl_info info;
    if (call == NULL || dladdr((void *)call, &info) == 0) fail("no library");
    first_page = info.dli_fbase;
    call((const unsigned char *)"\0\1\2\3\4\5", 6, without_tables);
    allocate();
}

// Others come and go while this thread has their like on its stack.
static void *come_and_go(void *path) {
    for (int i = 0; i < 300; i++) {
        void *handle = dlopen(path, RTLD_NOW);
        if (handle == NULL) fail("no library");
        Chain call = (Chain)dlsym(handle, "call");
        call((const unsigned char *)"\0\1\2\3\4\5", 6, allocate);
        dlclose(handle);
    }
    return NULL;
}

// One comes where another was; how often is what is returned.
static size_t in_turn(char **paths, int count) {
    char *last = NULL;
    size_t same = 0;
    for (int i = 0; i < 4 * count; i++) {
        void *handle = dlopen(paths[i % count], RTLD_NOW);
        Chain call = handle ? (Chain)dlsym(handle, "call") : NULL;
        Dl_info info;
        if (call == NULL || dladdr((void *)call, &info) == 0) fail("no library");
        call((const unsigned char *)"\0", 1, allocate);
        same += info.dli_fbase == last;
        last = info.dli_fbase;
        dlclose(handle);
    }
    return same;
}

// One thread maps and unmaps what the other's frames point to.
static char *flicker;
static volatile int done;
static void *flickering(void *unused) {
    while (!done) {
        if (mmap(flicker, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != flicker) fail("mmap");
        if (mprotect(flicker, PAGE, PROT_NONE) != 0) fail("mprotect");
    }
    return unused;
}

static void unsteady(void) {
    flicker = pages(1, PROT_NONE);
    pthread_t id;
    pthread_create(&id, NULL, flickering, NULL);
    for (int i = 0; i < 30000; i++) following(allocate, flicker + 8 * (i % 500));
    done = 1;
    pthread_join(id, NULL);
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    const char *what = argv[1];
    size_t n = argc > 2 ? strtoul(argv[2], NULL, 10) : 0;
    size_t used = 0;
    allocate();
#define IS(name) (strcmp(what, name) == 0)
    if (IS("jit")) from_code(WITH_FP, sizeof WITH_FP), from_code(WITHOUT_FP, sizeof WITHOUT_FP);
    else if (IS("jit_at_end")) code_ends = 1, from_code(WITH_FP, sizeof WITH_FP), from_code(WITHOUT_FP, sizeof WITHOUT_FP);
    else if (IS("jit_last")) last_of_page();
    else if (IS("jit_fp")) {
        uintptr_t values[] = {0, 8, 4095, 1ul << 47, -8ul, -1ul, (uintptr_t)&what, (uintptr_t)&what - (8 << 20), (uintptr_t)main};
        for (size_t i = 0; i < sizeof values / sizeof *values; i++) frame_pointer(values[i]);
    }
    else if (IS("jit_unmapped")) generate(WITHOUT_FP, sizeof WITHOUT_FP)(without_code);
    else if (IS("jit_unreadable")) generate(WITHOUT_FP, sizeof WITHOUT_FP)(without_access);
    else if (IS("registered")) registered(0);
    else if (IS("registered_unmapped")) registered(1);
    else if (IS("registered_changed")) registered_then_changed();
    else if (IS("registering")) registering();
    else if (IS("looping")) {
        for (int i = 0; i < 5; i++) looping(allocate, 3000);
        used = (size_t)clock() / (CLOCKS_PER_SEC / 1000);
    }
    else if (IS("pushing")) for (int i = 0; i < 20; i++) pushing(allocate);
    else if (IS("astray")) astray();
    else if (IS("fiber")) run_fiber(between_guards(n), n);
    else if (IS("fiber_in_heap")) for (int i = 0; i < 20; i++) used = painted_fiber(n);
    else if (IS("fiber_in_grown_heap")) {
        grow_heap();
        for (int i = 0; i < 20; i++) used = painted_fiber(n);
    }
    else if (IS("fiber_on_stack")) {
        char stack[n];
        for (int i = 0; i < 20; i++) run_fiber(stack, n);
    }
    else if (IS("thread")) thread(n, NULL);
    else if (IS("thread_on_ours")) thread(n, between_guards(n));
    else if (IS("alternate")) alternate(n);
    else if (IS("restorer")) own_restorer(1);
    else if (IS("restorer_unreadable")) own_restorer(0);
    else if (IS("library")) library(argv[3]);
    else if (IS("libraries")) {
        pthread_t ids[3];
        for (int i = 0; i < 3; i++) pthread_create(&ids[i], NULL, come_and_go, argv[3 + i]);
        for (int i = 0; i < 3; i++) pthread_join(ids[i], NULL);
    }
    else if (IS("in_turn")) used = in_turn(argv + 3, argc - 3);
    else if (IS("unsteady")) unsteady();
    else return 2;
    printf("ok %ld %zu\n", calls, used);
    return 0;
}
