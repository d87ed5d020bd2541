// A library of somebody's own: it has functions of CUDA's names, which mean something else and have other signatures.
#ifndef ANSWER
#define ANSWER 100
#endif
#define JUMPS __attribute__((optimize("optimize-sibling-calls")))
typedef double (*product)(double, double, const char *);
typedef struct { long of[8]; } eight;

double cuMemAlloc_v2(double a, double b, const char *text) { return ANSWER + a * b + text[0] - 'A'; }
int cuMemFree_v2(int a, int b, int c, int d, int e, int f, int g, int h) { return ANSWER + a + b + c + d + e + f + g + h; }
eight cuArrayCreate_v2(long a, long b) { return (eight){{a, b, ANSWER + a + b}}; }
int ncclGroupStart(void) { return ANSWER; }
double cublasSetWorkspace_v2(double a) { return ANSWER + a; }

// By symbol, at a function's end (which is a jump) and elsewhere, and by a table.
static const product table[] = {cuMemAlloc_v2};
JUMPS double jumps(void) { return cuMemAlloc_v2(1, 2, "C"); }
double calls(void) { return cuMemAlloc_v2(3, 4, "B") + cuMemFree_v2(1, 2, 3, 4, 5, 6, 7, 8) + cuArrayCreate_v2(5, 6).of[2]; }
double others(void) { return ncclGroupStart() + cublasSetWorkspace_v2(0.5); }
product given(void) { return table[0]; }
