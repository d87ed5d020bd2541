// A program that only allocates: its last request is more than the card has. Prints what was free then.
#include "cuda.h"
#include <stdio.h>

#pragma weak cudaMemGetInfo
int cudaMemGetInfo(size_t *free, size_t *total);

int main(void) {
    void *first, *kept, *none;
    size_t free = 0, total = 0;
    if (cudaMalloc(&first, 1000) || cudaMalloc(&kept, 100 << 20) || cudaFree(first)) return 1;
    if (cudaMalloc(&none, (size_t)300 << 30) == 0 || cudaMemGetInfo(&free, &total)) return 2;
    printf("%zu\n", free);
    return 0;
}
