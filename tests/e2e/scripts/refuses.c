// A device that has failed, as far as one function shows: REFUSES=FUNCTION:ERROR. Refused are a cudaMalloc of 64 MiB, the second
// reservation of addresses, and the third chunk of 20 MiB (or the access to more than that) of an expandable segment.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static int refused(const char *name) {
    const char *error = getenv("REFUSES");
    size_t length = strlen(name);
    return error && !strncmp(error, name, length) && error[length] == ':' ? atoi(error + length + 1) : 0;
}

// Not by `dlsym`, which is ours below.
static void *real(void *handle, const char *name) {
    static void *(*found)(void *, const char *);
    if (!found)
        found = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (!found)
        abort();
    return found(handle, name); // a jump, or whoever asks for the next one is taken for us
}

#define REAL(...) ((int (*)(__VA_ARGS__))real(RTLD_NEXT, __func__))
#define REFUSE(when)                                  \
    do {                                              \
        static int calls;                             \
        (void)calls;                                  \
        if ((when) && refused(__func__))              \
            return refused(__func__);                 \
    } while (0)
#define CHUNK (20 << 20)

int cudaMalloc(void **addr, size_t size) {
    REFUSE(size == 64 << 20);
    return REAL(void **, size_t)(addr, size);
}

int cuMemAddressReserve(void *addr, size_t size, size_t align, size_t wanted, size_t flags) {
    REFUSE(++calls == 2);
    return REAL(void *, size_t, size_t, size_t, size_t)(addr, size, align, wanted, flags);
}

int cuMemCreate(void *handle, size_t size, void *properties, size_t flags) {
    REFUSE(size == CHUNK && ++calls == 3);
    return REAL(void *, size_t, void *, size_t)(handle, size, properties, flags);
}

int cuMemMap(size_t addr, size_t size, size_t offset, size_t handle, size_t flags) {
    REFUSE(size == CHUNK && ++calls == 3);
    return REAL(size_t, size_t, size_t, size_t, size_t)(addr, size, offset, handle, flags);
}

int cuMemSetAccess(size_t addr, size_t size, void *access, size_t count) {
    REFUSE(size > CHUNK && ++calls == 1);
    return REAL(size_t, size_t, void *, size_t)(addr, size, access, count);
}

// PyTorch asks the runtime for the driver's functions, and before 2.7 the driver's library; who is in front of the driver must
// answer that as well.
static void *ours(const char *name) {
    if (!refused(name))
        return NULL;
    const struct {
        const char *name;
        void *function;
    } all[] = {{"cuMemAddressReserve", cuMemAddressReserve},
               {"cuMemCreate", cuMemCreate},
               {"cuMemMap", cuMemMap},
               {"cuMemSetAccess", cuMemSetAccess}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(name, all[i].name))
            return all[i].function;
    return NULL;
}

#define ANSWER(code)                \
    do {                            \
        int answer = (code);        \
        if (!answer && ours(name))  \
            *function = ours(name); \
        return answer;              \
    } while (0)

int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *status) {
    ANSWER(REAL(const char *, void **, unsigned long long, int *)(name, function, flags, status));
}

int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *status) {
    ANSWER(REAL(const char *, void **, unsigned, unsigned long long, int *)(name, function, version, flags, status));
}

void *dlsym(void *handle, const char *name) {
    void *answer = handle == RTLD_NEXT || handle == RTLD_DEFAULT ? NULL : ours(name);
    return answer ? answer : real(handle, name);
}
