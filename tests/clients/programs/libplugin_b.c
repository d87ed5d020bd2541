// The same once more, as another plugin.
#define ANSWER 20000
#include "libplugin_a.c"
