/* memtrace: the C functions of libmemtrace.so.
 *
 * Written by tests/interface.rs from the source of the library. A program that is not linked to the
 * library looks them up when it runs, so that it also works untraced:
 *
 *     int (*dump)(const char *) = (int (*)(const char *))dlsym(RTLD_DEFAULT, "memtrace_dump");
 *     if (dump) dump("after_step_10.pickle");
 */
#ifndef MEMTRACE_H
#define MEMTRACE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Writes a snapshot of now. path NULL: the next free name in MEMTRACE_OUT. A path that ends in
 * .json gets JSON, in .pickle or .pkl a pickle, any other what MEMTRACE_FORMAT says; a file of that
 * name is replaced. Returns 0; 1 if nothing was recorded because no CUDA call has been made; 2 if
 * the file could not be written (the reason is on stderr). */
int memtrace_dump(const char *path);

/* 1 if memtrace is recording in this process, else 0. */
int memtrace_active(void);

/* The version (0.1.0), as a C string that lives for ever. */
const char *memtrace_version(void);

/* --- Labels: what the calling thread is doing. What it allocates carries ---
 * the label; ranges are of a thread. --- */

/* Opens a named range inside those that are open; returns how many were open. */
int memtrace_push(const char *name);

/* The same for a module that is called, by its full name: beside the module around it, inside all
 * else. */
int memtrace_push_module(const char *name);

/* The same for a phase of training (forward), whose beginning and end are written down, too. */
int memtrace_push_phase(const char *name);

/* Closes the innermost range; returns how many are still open, -1 if there was none. */
int memtrace_pop(void);

/* Closes ranges until depth are open: those that an exception left behind. */
void memtrace_unwind(int depth);

/* The number of a label: a name inside the label parent (0: inside nothing), of a sort (0 range, 1
 * phase, 2 module, 3 operator). The same each time; parent itself if there is no room for more. */
uint32_t memtrace_label(uint32_t parent, int sort, const char *name);

/* Gives the calling thread this label (0: none) and returns the one it had, to be given back at the
 * end of the range. */
uint32_t memtrace_enter(uint32_t label);

/* The calling thread's label. */
uint32_t memtrace_current(void);

/* The sort of a label, as in memtrace_label; 0 if there is none of this number. */
int memtrace_label_sort(uint32_t label);

/* The label that a label is inside of; 0 if there is none. */
uint32_t memtrace_label_parent(uint32_t label);

/* Writes the names of a label, outermost first and with / between them, as a C string of at most
 * size bytes. Returns the length of the whole. */
size_t memtrace_label_path(uint32_t label, char *into, size_t size);

/* Writes down that the program passed a point. sort: 1 a moment, 2 a step of the training loop
 * (number is which), 3 and 4 begin and end of a phase. Nothing if nothing is recorded yet. */
void memtrace_mark(const char *name, int sort, uint64_t number);

/* --- Modules that are called: for the Python package --- */

/* How Python calls (vectorcall) the function that stands for torch.nn.Module._compiled_call_impl:
 * says which module is called and goes on. */
void *memtrace_module_called(void *function, void *const *arguments, size_t count, void *keywords);

/* Python's PyObject_VectorcallMethod, and the name (a string of Python's that lives for ever) of
 * the method with which memtrace_module_called goes on. */
void memtrace_calls_begin(void *call, void *method);

/* Whenever the module at this address is called, until watch is removed, one of three things is
 * noted. With sort 0 the phase forward begins. With 1 the module of this name runs. With 2 the
 * module of this number runs, for the records of operators. */
void memtrace_calls_add(const void *module, uint32_t watch, int sort, const char *name,
    uint32_t number);

/* Ends all that watch has added. */
void memtrace_calls_remove(uint32_t watch);

/* The module at this address is gone. */
void memtrace_calls_forget(const void *module);

/* --- Numbers --- */

/* What PyTorch's allocator has on a device, four numbers of bytes: allocated, reserved, and the
 * most of each since memtrace_restart_peak or the beginning. Returns 1 if that is known, else 0 and
 * into is as it was. */
int memtrace_memory(int device, uint64_t *into);

/* From here on the most that was allocated is counted anew, as memtrace_memory says it. PyTorch's
 * own statistics stay as they are. */
void memtrace_restart_peak(int device);

/* The most was at least that: what was known before memtrace_restart_peak, for whoever counted
 * before. */
void memtrace_raise_peak(int device, uint64_t allocated, uint64_t reserved);

/* --- Operators of PyTorch's: a record at the end of each, while asked for --- */

/* What must be known of operators before they can be seen as they begin. Each is a line with three
 * parts and tabs between them: the name of its C++ structure (add_Tensor), its own name
 * (aten::add.Tensor), and a digit. The digit is 1 if the operator is made of others, and 2 if its
 * autograd kernel excludes autograd while it works. It is 4 more if autocast has a kernel for
 * it. */
void memtrace_operators_learn(const char *text);

/* Gets ready for operators to leave records with what device has. modes is the number of PyTorch's
 * dispatch key for dispatch modes. The others are keys as bits: below those that are excluded below
 * autograd, views those that may be, too, and autocast those of autocast. An operator must run
 * before memtrace_operators_start. */
void memtrace_operators_prepare(int device, uint32_t modes, uint64_t below, uint64_t views,
    uint64_t autocast);

/* From here on every operator leaves a record. Returns 0 if PyTorch is not there or does not say
 * its operators, 1 if it says them by callbacks, 2 if they are seen as they begin. */
int memtrace_operators_start(void);

/* No more records; those that were made can still be read. */
void memtrace_operators_stop(void);

/* Operators from here on belong to this module, in the caller's own numbering. */
void memtrace_operators_module(uint32_t number);

/* The number of the next record. lost, if not NULL, gets how many found no room so far. */
uint64_t memtrace_operators_count(uint64_t *lost);

/* Copies up to so many records from number from on; returns how many. Each is five words. The first
 * has the operator's label and how deep it was inside others (from bit 32). It also says whether an
 * exception ended it (bit 45), whether no dispatch mode could see it (bit 46), and whether a node
 * of autograd's ran it (bit 47). From bit 48 it has the thread. The second has the module and (from
 * bit 32) the thread's label. The others are bytes allocated, reserved, and waiting for other
 * streams. */
size_t memtrace_operators_read(uint64_t from, size_t records, uint64_t *into);

/* Records before this number will not be read again. */
void memtrace_operators_release(uint64_t upto);

/* --- Changes of what is allocated: a record of each, while asked for --- */

/* With on, one tracker more: every block that PyTorch's allocator hands out or takes back and every
 * change of a thread's label leaves a record; without, one less. */
void memtrace_changes_ask(int on);

/* The number of the next record. lost, if not NULL, gets how many found no room so far. */
uint64_t memtrace_changes_count(uint64_t *lost);

/* Copies up to so many records from number from on, up to the first that isn't there; returns how
 * many. Each is four words. The first says what happened: 1 allocated, 2 freed, 3 labelled, 4
 * handed to cuBLAS as a workspace. From bit 4 it has the work it was part of: 1 backward, 2
 * computed again by a checkpoint, 3 a gradient is put into its place. It also has the device (bit
 * 8), the thread (bit 16) and the thread's label (bit 40). The second is the address, the third the
 * bytes. The fourth is there while operators are asked for. It says how many of them are open on
 * this thread, the thread's number in their records (bit 16) and the number of their next record
 * (bit 32). */
size_t memtrace_changes_read(uint64_t from, size_t records, uint64_t *into);

/* Records before this number will not be read again. */
void memtrace_changes_release(uint64_t upto);

/* --- How recording goes --- */

/* How recording goes, as JSON: a C string of at most size bytes. Returns the length of the
 * whole. */
size_t memtrace_stats(char *into, size_t size);

/* --- memtrace as an allocator --- For torch.cuda.memory.CUDAPluggableAllocator and ---
 * torch.cuda.MemPool. The signatures are PyTorch's; streams are cudaStream_t. memtrace.install() in
 * Python wires all of them, and gives back what PyTorch refuses under a pluggable allocator. */

/* Devices that PyTorch knows, from when its allocator comes up. */
void memtrace_init(int device_count);

/* Memory of a device for a stream; NULL for no bytes. Where there is none, PyTorch gets its own
 * exception if this is its allocator; everybody else gets NULL. */
void *memtrace_malloc(size_t size, int device, void *stream);

/* Gives memory back. What was not handed out here, or was given back already, is left alone, and
 * reported. */
void memtrace_free(void *addr, size_t size, int device, void *stream);

/* torch.cuda.empty_cache(): gives everything cached back to the devices. */
void memtrace_reset(void);

/* torch.cuda.set_per_process_memory_fraction(). */
void memtrace_memory_fraction(double fraction, int device);

/* Where the segment begins that a block lies in, and how long it is. */
void *memtrace_base_alloc(void *addr, size_t *size);

/* Another stream uses the block at this address. Memory that was not allocated here is ignored. */
void memtrace_record_stream(void *addr, void *stream);

/* Sends what filter wants to a pool: for a graph's capture, or for as long as a MemPool is in use.
 * The filter is a const std::function<bool(cudaStream_t)> *; NULL for all streams. */
void memtrace_begin_allocate_to_pool(int device, uint64_t first, uint64_t second,
    const void *filter);

/* Sends nothing there any more. */
void memtrace_end_allocate_to_pool(int device, uint64_t first, uint64_t second);

/* A pool is held once less. */
void memtrace_release_pool(int device, uint64_t first, uint64_t second);

/* --- What the Python package asks the allocator --- These go with the package of the same version ---
 * and may change with the next. Answers that are strings are JSON, or what is wrong, and go back to
 * memtrace_string_free; NULL is none. */

/* Gives a string back that one of these functions returned. */
void memtrace_string_free(char *text);

/* torch.cuda.memory_stats(device), flat, as JSON. */
char *memtrace_allocator_stats(int device);

/* All segments with their blocks, as torch.cuda.memory._snapshot() lists them, as JSON; of one
 * pool, unless its id is (0, 0). Unless quiet, the trace says that somebody looked. */
char *memtrace_allocator_segments(uint64_t first, uint64_t second, int quiet);

/* A moment between events, in microseconds since 1970: everything recorded before has at most this
 * time, everything recorded afterwards a later one. */
uint64_t memtrace_now_us(void);

/* torch.cuda.reset_peak_memory_stats(device). */
void memtrace_allocator_reset_peak(int device);

/* torch.cuda.reset_accumulated_memory_stats(device). */
void memtrace_allocator_reset_accumulated(int device);

/* The fraction of a device's memory that may be used. */
double memtrace_allocator_fraction(int device);

/* Changes settings, as PYTORCH_CUDA_ALLOC_CONF has them. Returns NULL, or PyTorch's words of
 * refusal. */
char *memtrace_allocator_configure(const char *conf);

/* The allocator_settings of a snapshot, as JSON; NULL before memtrace_allocator_configure. */
char *memtrace_allocator_settings(void);

/* Does something to a pool: hold (make it), release, empty, use_on_oom, no_split. Returns NULL, or
 * what is wrong. */
char *memtrace_allocator_pool(int device, uint64_t first, uint64_t second, const char *wish);

/* Segments of a pool come from these functions, with PyTorch's signatures. Returns NULL, or what is
 * wrong. */
char *memtrace_allocator_pool_source(int device, uint64_t first, uint64_t second,
    void *(*malloc)(size_t, int, void *), void (*free)(void *, size_t, int, void *));

/* How many hold a pool; -1 if there is none. */
int64_t memtrace_allocator_pool_uses(int device, uint64_t first, uint64_t second);

/* From now on observer(device, bytes asked of the device, bytes allowed, bytes free there) is
 * called when memory has run out. It is called in the thread that wanted memory, before that thread
 * gets its answer. */
void memtrace_allocator_observe_oom(void (*observer)(int64_t, uint64_t, uint64_t, uint64_t));

#ifdef __cplusplus
}
#endif
#endif
