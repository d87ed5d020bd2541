// Asks for the functions of its own names that come next.
#include <dlfcn.h>

const char *whose(void) {
    const char *(*next)(void) = dlsym(RTLD_NEXT, "whose");
    return next == whose ? "its own" : next ? next() : "nobody's";
}

const char *cuWhose(void) {
    const char *(*next)(void) = dlsym(RTLD_NEXT, "cuWhose");
    return next == cuWhose ? "its own" : next ? next() : "nobody's";
}
