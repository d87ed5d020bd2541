// A file system whose user has used up a quota: beyond 64 KiB nothing is written to a file as long as the one that QUOTA names is there.
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

ssize_t write(int file, const void *from, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    struct stat to;
    const char *path = getenv("QUOTA");
    if (!real) real = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    if (path && fstat(file, &to) == 0 && S_ISREG(to.st_mode) && to.st_size + size > 65536 && access(path, F_OK) == 0) {
        errno = EDQUOT;
        return -1;
    }
    return real(file, from, size);
}
