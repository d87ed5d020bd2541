/* memtrace: the C functions of libmemtrace.so.
 *
 * A program that is not linked to the library looks them up when it runs, so that it also works untraced:
 *
 *     int (*dump)(const char *) = (int (*)(const char *))dlsym(RTLD_DEFAULT, "memtrace_dump");
 *     if (dump) dump("after_step_10.pickle");
 */
#ifndef MEMTRACE_H
#define MEMTRACE_H

#ifdef __cplusplus
extern "C" {
#endif

/* Writes a snapshot of now. path NULL: the next free name in MEMTRACE_OUT. A path that ends in .json gets JSON, in
 * .pickle or .pkl a pickle, any other what MEMTRACE_FORMAT says; a file of that name is replaced.
 * Returns 0; 1 if nothing was recorded because no CUDA call has been made; 2 if the file could not be written
 * (the reason is on stderr). */
int memtrace_dump(const char *path);

/* 1 if memtrace is recording in this process, else 0. */
int memtrace_active(void);

/* The version, for example "0.1.0". */
const char *memtrace_version(void);

#ifdef __cplusplus
}
#endif
#endif
