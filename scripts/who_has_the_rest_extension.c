// A C extension that takes memory without telling anybody.
#include <stddef.h>

extern int cudaMalloc(void **at, size_t size);

int take(size_t size) {
    void *at;
    return cudaMalloc(&at, size);
}
