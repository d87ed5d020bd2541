// Closes libraries: by symbol, for who opens this one so that its own dependencies come first; and, preloaded behind memtrace, as
// another interposer, which then runs what else is to happen as soon as a library is gone.
#include <dlfcn.h>
#include <stddef.h>

void (*meanwhile)(void);

#ifdef INTERPOSES
int dlclose(void *library) {
    int code = ((int (*)(void *))dlsym(RTLD_NEXT, "dlclose"))(library);
    void (*now)(void) = meanwhile;
    meanwhile = NULL;
    if (now) now();
    return code;
}
#else
int closes(void *library) { return dlclose(library); }
#endif
