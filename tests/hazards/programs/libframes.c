// Functions with every kind of frame that unwind tables describe. Each does its part of a chain of calls and hands on; the last
// one calls back.
#include <alloca.h>
#include <string.h>

typedef void (*Then)(void);
typedef struct {
    const unsigned char *kinds; // of the calls that are left
    int left;
    Then then;
} Chain;

void follow(Chain chain);

#define KEEP(what) __asm__ volatile("" ::"r"(what) : "memory")

__attribute__((noinline)) void plain(Chain chain) {
    follow(chain);
    KEEP(&chain);
}

__attribute__((noinline)) void large(Chain chain) {
    char space[9000];
    memset(space, 1, sizeof space);
    follow(chain);
    KEEP(space);
}

__attribute__((noinline)) void with_frame_pointer(Chain chain) {
    char *space = alloca(16 + chain.left);
    space[0] = 1;
    follow(chain);
    KEEP(space);
}

// Realigned: where the caller's frame is takes an expression.
__attribute__((noinline)) void aligned(Chain chain) {
    char space[256] __attribute__((aligned(128)));
    space[0] = 1;
    follow(chain);
    KEEP(space);
}

__attribute__((noinline)) void all_registers(Chain chain) {
    long a = chain.left, b = a + 1, c = a + 2, d = a + 3, e = a + 4;
    __asm__ volatile("" : "+b"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e)::"memory");
    follow(chain);
    __asm__ volatile("" ::"b"(a), "r"(b), "r"(c), "r"(d), "r"(e));
}

// A caller's stack pointer in a register that rules don't know, and a place that an expression computes.
void odd(const Chain *chain);
__asm__(
    ".text\n.globl odd\n.type odd, @function\nodd:\n"
    ".cfi_startproc\n"
    "push %rbx\n.cfi_def_cfa_offset 16\n.cfi_offset rbx, -16\n"
    "lea 16(%rsp), %rbx\n.cfi_def_cfa rbx, 0\n"
    "sub $64, %rsp\n"
    "and $-64, %rsp\n"
    "call follow_by_pointer@PLT\n"
    "lea -16(%rbx), %rsp\n.cfi_def_cfa rsp, 16\n"
    "pop %rbx\n.cfi_def_cfa_offset 8\n"
    "ret\n"
    ".cfi_endproc\n.size odd, .-odd\n");

void follow_by_pointer(const Chain *chain) {
    follow(*chain);
    KEEP(chain);
}

__attribute__((noinline)) void follow(Chain chain) {
    static void (*const functions[])(Chain) = {plain, large, with_frame_pointer, aligned, all_registers};
    if (chain.left == 0) {
        chain.then();
    } else {
        int kind = *chain.kinds % 6;
        chain.kinds++, chain.left--;
        if (kind == 5)
            odd(&chain);
        else
            functions[kind](chain);
    }
    KEEP(&chain);
}

void call(const unsigned char *kinds, int count, Then then) {
    Chain chain = {kinds, count, then};
    follow(chain);
    KEEP(&chain);
}
