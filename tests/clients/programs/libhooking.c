// The same, with a dlsym of its own.
#define NAME "hooking"
#define OWN_DLSYM
#include "libbefore.c"
