"""The major version of CUDA that a program's PyTorch is linked with decides what some functions
mean. The virtual GPU takes an unknown version for no other, and says what to do."""

import client
import pytest
import support

# What the virtual GPU finds PyTorch by: the name of the library, and that of the runtime in it.
TORCH = 'const char needed[] = "libcudart.so.%d";\n'
PROGRAM = """
#include <dlfcn.h>
#include <stdio.h>
#define WEAK __attribute__((weak)) int
WEAK cudaGetDeviceCount(int *);
WEAK cuInit(unsigned);
WEAK cudaStreamCreate(void **);
WEAK cudaStreamBeginCapture(void *, int);
WEAK cudaStreamGetCaptureInfo(void *, int *, long *, void **, void **, void **, long *);
int main(int argc, char **argv) {
    int devices = 0, status = -1;
    long id = -1, count = -1;
    void *stream = 0, *graph = &graph, *nodes = &nodes, *edges = &edges;
    if (!dlopen(argv[argc - 1], RTLD_NOW)) return 1;
    printf("%d ", cudaGetDeviceCount(&devices));
    printf("%d %d\\n", devices, cuInit(0));
    cudaStreamCreate(&stream);
    cudaStreamBeginCapture(stream, 0);
    printf("%d ", cudaStreamGetCaptureInfo(stream, &status, &id, &graph, &nodes, &edges, &count));
    printf("%d %d %d\\n", status, id > 0, (graph != &graph) + (nodes != &nodes) + (edges != &edges) + (count != -1));
    return 0;
}
"""
NO_DRIVER, MISMATCH = 35, 803


@pytest.fixture
def run(tmp_path):
    def run(major):
        for name, text in [("program", PROGRAM), ("torch", TORCH % major)]:
            (tmp_path / f"{name}.c").write_text(text)
        torch = client.compile(tmp_path / "torch.c", tmp_path / "libc10_cuda.so")
        program = client.compile(tmp_path / "program.c", tmp_path / "program")
        done = support.must(support.record([program, torch], tmp_path / "out", run=("--record", "off")))
        first, second = ([int(number) for number in line.split()] for line in done.stdout.splitlines())
        return first, second, [line for line in done.stderr.splitlines() if "CUDA" in line]

    return run


# CUDA 12 ends this function's parameters after the id: what is in the
# registers behind them is not the callee's.
@pytest.mark.parametrize("major, given", [(12, 0), (13, 4)])
def test_a_known_toolkit_has_its_own_parameters(major, given, run):
    found, info, said = run(major)
    assert (found, said) == ([0, 1, 0], [])
    assert info == [0, 1, 1, given]


@pytest.mark.parametrize("major", [11, 14])
def test_an_unknown_toolkit_is_refused(major, run):
    found, _, said = run(major)
    assert found == [NO_DRIVER, 1, MISMATCH]
    [line] = said
    assert f"built for CUDA {major}" in line and "use a PyTorch for one of those" in line
