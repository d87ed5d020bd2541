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
