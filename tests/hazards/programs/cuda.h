// The few functions of CUDA's that these programs call. Weak, so that no library of CUDA's is needed to
// link them: they are bound at the start, to what was preloaded.
#include <stddef.h>

#pragma weak cudaMalloc
#pragma weak cudaFree
int cudaMalloc(void **out, size_t size);
int cudaFree(void *at);

typedef struct CUctx_st *CUcontext;
#pragma weak cuInit
#pragma weak cuCtxSetCurrent
#pragma weak cuDevicePrimaryCtxRetain
#pragma weak cuDevicePrimaryCtxRelease_v2
#pragma weak cuDevicePrimaryCtxGetState
int cuInit(unsigned flags);
int cuCtxSetCurrent(CUcontext context);
int cuDevicePrimaryCtxRetain(CUcontext *context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active);

#pragma weak cuMemAlloc_v2
#pragma weak cuMemFree_v2
#pragma weak cuMemCreate
#pragma weak cuMemAddressReserve
#pragma weak cuMemMap
int cuMemAlloc_v2(unsigned long long *out, size_t size);
int cuMemFree_v2(unsigned long long at);
int cuMemCreate(unsigned long long *out, size_t size, const void *properties, unsigned long long flags);
int cuMemAddressReserve(unsigned long long *out, size_t size, size_t align, unsigned long long at, unsigned long long flags);
int cuMemMap(unsigned long long at, size_t size, size_t offset, unsigned long long handle, unsigned long long flags);
