"""A program with CUDA's runtime linked into itself. It needs undocumented tables of the driver, so
the virtual GPU refuses it and says why."""

from pathlib import Path

import client
import pytest
import support
import torch

PROGRAM = """
#include <stdio.h>
int cudaMalloc(void **, unsigned long);
int main(void) { void *at = 0; printf("%d\\n", cudaMalloc(&at, 5 << 20)); return 0; }
"""
NOT_SUPPORTED = "801\n"


@pytest.mark.parametrize("record", ["on", "off"])
def test_is_refused_by_name(record, tmp_path):
    beside_torch = Path(torch.__file__).parents[1] / "nvidia"
    static = next(beside_torch.rglob("libcudart_static.a"), None)
    if static is None:
        pytest.skip("this PyTorch comes without the static runtime")
    source = tmp_path / "program.c"
    source.write_text(PROGRAM)
    program = client.compile(source, tmp_path / "program", static, "-lrt")
    done = support.must(support.record([program], tmp_path / "out", run=("--record", record)))
    assert done.stdout == NOT_SUPPORTED
    [refusal] = [line for line in done.stderr.splitlines() if line.startswith("memtrace: virtual GPU: ")]
    assert "cuGetExportTable is not supported" in refusal and "nvcc -cudart shared" in refusal
    nothing = "memtrace: nothing recorded: the program has loaded CUDA but asked it for no memory"
    assert (nothing in done.stderr.splitlines()) == (record == "on")
    assert support.files(tmp_path / "out") == []
