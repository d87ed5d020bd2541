// Memory that ends while a snapshot is written: once somebody has looked whether there is much (and given it back), so many
// more allocations (STARVE) succeed, and then none does.
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t), *__libc_memalign(size_t, size_t);

static volatile long left = -1; // nobody has looked

int munmap(void *at, size_t size) {
    const char *count = getenv("STARVE");
    if (size >= 24 << 20 && left < 0 && count != NULL) left = atol(count);
    return (int)syscall(SYS_munmap, at, size);
}

static int is_out(void) {
    if (left < 0) return 0;
    if (left > 0) return left--, 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size) { return is_out() ? NULL : __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return is_out() ? NULL : __libc_calloc(count, size); }
void *realloc(void *at, size_t size) { return is_out() ? NULL : __libc_realloc(at, size); }
int posix_memalign(void **at, size_t align, size_t size) {
    *at = is_out() ? NULL : __libc_memalign(align, size);
    return *at == NULL ? ENOMEM : 0;
}
