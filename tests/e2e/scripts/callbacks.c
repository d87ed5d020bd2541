// Ways in which C calls back into Python: at once, through other C functions, and from a thread that Python has never seen.

#include <pthread.h>
#include <setjmp.h>
#include <stdlib.h>

typedef int (*callback)(int);

static int called(callback f, int n) {
    return f(n);
}

int through(callback f, int n) {
    volatile int more = n; // not a tail call
    return called(f, more) + (int)(more != n);
}

// A frame of a size that is known only when it runs.
int through_alloca(callback f, int n) {
    volatile char *room = __builtin_alloca((size_t)(n % 7 + 1) * 300);
    room[0] = 1;
    return called(f, n) + (room[0] != 1);
}

// Leaves C frames behind without returning through them, and calls again from where it came back to.
int after_longjmp(callback f, int n) {
    static __thread jmp_buf back;
    volatile int at = n;
    if (setjmp(back) == 0) {
        called(f, at);
        longjmp(back, 1);
    }
    return called(f, at);
}

static callback compare;
static int order(const void *a, const void *b) {
    return compare(*(const int *)a - *(const int *)b);
}

int sort_of_three(callback f) {
    int numbers[3] = {3, 1, 2};
    compare = f;
    qsort(numbers, 3, sizeof(int), order);
    return numbers[0];
}

struct job {
    callback f;
    int n, result;
};

static void *work(void *argument) {
    struct job *job = argument;
    job->result = through(job->f, job->n);
    return NULL;
}

// Call without the GIL (ctypes.CDLL): the thread needs it.
int in_thread(callback f, int n) {
    struct job job = {f, n, -1};
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, &job) != 0) return -1;
    pthread_join(thread, NULL);
    return job.result;
}
