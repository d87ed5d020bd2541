// The driver's green contexts, which the virtual GPU has not: handles, and a current context as far as this needs one. What is
// not about them is passed on.
#include <dlfcn.h>

static char green, context;

int cuGreenCtxCreate(void **out, void *resources, int device, unsigned flags) {
    (void)resources, (void)device, (void)flags;
    return *out = &green, 0;
}

int cuCtxFromGreenCtx(void **out, void *of) { return *out = &context, of != &green; }

int cuGreenCtxDestroy(void *of) { return of != &green; }

int cuCtxSetCurrent(void *of) { return of == &context ? 0 : ((int (*)(void *))dlsym(RTLD_NEXT, "cuCtxSetCurrent"))(of); }
