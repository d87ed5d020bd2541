// tables LIBRARY PROGRESS FIRST COUNT: loads a library, changes some bytes of its unwind tables, and allocates under a chain of its
// functions; so many times, with another seed each. The seed at work is kept in PROGRESS, for whoever finds us dead.
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda.h"

typedef void (*Call)(const unsigned char *kinds, int count, void (*then)(void));

static uint64_t state;
static uint64_t below(uint64_t n) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (state >> 16) % n;
}

static void allocate(void) {
    void *at = NULL;
    if (cudaMalloc(&at, 1000) != 0 || cudaFree(at) != 0) _exit(9);
}

typedef struct {
    const void *inside;
    unsigned char *index, *entries;
    size_t index_size, entries_size;
} Tables;

// Where the tables of the library are that has this address: the index is a segment, and says where the entries are, which end
// with the segment that they are in.
static int find(struct dl_phdr_info *info, size_t size, void *out) {
    Tables *tables = out;
    const ElfW(Phdr) *index = NULL;
    int here = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *h = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + h->p_vaddr;
        if (h->p_type == PT_LOAD && (uintptr_t)tables->inside - start < h->p_memsz) here = 1;
        if (h->p_type == PT_GNU_EH_FRAME) index = h;
    }
    if (!here || index == NULL) return 0;
    tables->index = (unsigned char *)info->dlpi_addr + index->p_vaddr;
    tables->index_size = index->p_memsz;
    int32_t distance;
    memcpy(&distance, tables->index + 4, 4);
    tables->entries = tables->index + 4 + distance;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *h = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + h->p_vaddr;
        if (h->p_type == PT_LOAD && (uintptr_t)tables->entries - start < h->p_filesz)
            tables->entries_size = start + h->p_filesz - (uintptr_t)tables->entries;
    }
    return 1;
}

// What compilers never write, among what they do.
static void change(unsigned char *at, size_t size) {
    size_t place = below(size);
    switch (below(6)) {
    case 0: at[place] ^= 1 << below(8); break;
    case 1: at[place] = below(256); break;
    case 2: at[place] = 0x0f; break; // the caller's frame by an expression
    case 3: at[place] = "\x10\x16\x09\x0e\x0c\x13\x14\x2e"[below(8)]; break;
    case 4: memset(at + place, (int)below(256), 1 + below(size - place < 8 ? size - place : 8)); break;
    default:
        for (size_t i = 0; i < 4 && place + i < size; i++) at[place + i] = below(256);
    }
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    uint64_t first = strtoull(argv[3], NULL, 10), count = strtoull(argv[4], NULL, 10);
    int progress = open(argv[2], O_RDWR | O_CREAT, 0600);
    for (uint64_t seed = first; seed < first + count; seed++) {
        if (pwrite(progress, &seed, 8, 0) != 8) return 2;
        state = seed * 0x9e3779b97f4a7c15 + 1;
        void *library = dlopen(argv[1], RTLD_NOW);
        if (library == NULL) return 3;
        Call call = (Call)dlsym(library, "call");
        Tables tables = {.inside = (void *)call};
        if (call == NULL || !dl_iterate_phdr(find, &tables) || tables.entries_size == 0) return 3;
        // Everything between the two is changed with them.
        uintptr_t low = (uintptr_t)tables.index & ~4095ul;
        uintptr_t high = (uintptr_t)(tables.entries + tables.entries_size + 4095) & ~4095ul;
        if (mprotect((void *)low, high - low, PROT_READ | PROT_WRITE) != 0) return 4;
        unsigned char kinds[12];
        for (size_t i = 0; i < sizeof kinds; i++) kinds[i] = below(6);
        if (below(4) == 0) call(kinds, below(sizeof kinds), allocate);
        for (uint64_t n = 1 + below(8); n > 0; n--) {
            if (below(4) == 0)
                change(tables.index, tables.index_size);
            else
                change(tables.entries, tables.entries_size);
        }
        // What was learnt before the change stays; the rest is new.
        for (int i = 0; i < 3; i++) {
            call(kinds, below(sizeof kinds), allocate);
            kinds[below(sizeof kinds)] = below(6);
        }
        dlclose(library);
    }
    printf("ok %lu\n", (unsigned long)count);
    return 0;
}
