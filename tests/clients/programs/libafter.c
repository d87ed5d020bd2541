// The same, preloaded behind memtrace.
#define NAME "after"
#include "libbefore.c"
