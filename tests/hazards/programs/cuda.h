// The few functions of CUDA's runtime that these programs call. Weak, so that no library of CUDA's is needed to
// link them: they are bound at the start, to what was preloaded.
#include <stddef.h>

#pragma weak cudaMalloc
#pragma weak cudaFree
int cudaMalloc(void **out, size_t size);
int cudaFree(void *at);
