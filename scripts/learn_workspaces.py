"""Measures the workspaces that cuDNN takes for convolutions on this
machine's GPU, and prints a table of them.

    python scripts/learn_workspaces.py [--shapes FILE]

`scripts/gpu_check --learn TABLE` runs it. The virtual GPU takes the table where
MEMTRACE_VIRTUAL_WORKSPACES names it; crates/virtual-gpu/src/libs/dnn/table.rs has the format. FILE
is any text with convolutions in the table's words: what a run on a virtual GPU says with
MEMTRACE_VIRTUAL_LOG=1, for example. Without it, those of the networks below are measured.

PyTorch takes the workspace from its allocator and gives it back before the operator returns. So its
bytes are the peak of what was requested, less what was there before and what the operator returned.
Each convolution runs once before, so that plans are made and kernels loaded.
"""

import argparse
import re
import sys
from pathlib import Path

import torch

OPERATIONS = ("forward", "backward_data", "backward_filter")
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
LAYOUTS = ("nchw", "nhwc")
SIZES = r"\d+(?:x\d+)*"
PROBLEM = re.compile(
    rf"\b({'|'.join(OPERATIONS)}) ({'|'.join(TYPES)}) ({'|'.join(LAYOUTS)}) ({SIZES}) ({SIZES})"
    rf" pad ({SIZES}) stride ({SIZES}) dilation ({SIZES}) groups (\d+)"
)


def joined(sizes):
    return "x".join(map(str, sizes))


def problem(operation, kind, layout, x, w, pad, stride, dilation, groups):
    """A convolution in the table's words."""
    return (
        f"{operation} {kind} {layout} {joined(x)} {joined(w)}"
        f" pad {joined(pad)} stride {joined(stride)} dilation {joined(dilation)} groups {groups}"
    )


def square(batch, inputs, outputs, edge, size, stride=1, groups=1, dimensions=2):
    """Input, filter and the rest of a convolution that keeps its edges."""
    x = [batch, inputs] + [edge] * dimensions
    w = [outputs, inputs // groups] + [size] * dimensions
    return x, w, [size // 2] * dimensions, [stride] * dimensions, [1] * dimensions, groups


def residual(batch):
    """ResNet-50."""
    yield square(batch, 3, 64, 224, 7, 2)
    inputs, edge = 64, 56
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        outputs, after = width * 4, edge // stride
        yield square(batch, inputs, width, edge, 1)
        yield square(batch, width, width, edge, 3, stride)
        yield square(batch, inputs, outputs, edge, 1, stride)
        yield square(batch, width, outputs, after, 1)
        yield square(batch, outputs, width, after, 1)
        yield square(batch, width, width, after, 3)
        inputs, edge = outputs, after


def others():
    """Parts of VGG, U-Net, MobileNet and of a three-dimensional network."""
    for inputs, outputs, edge in ((64, 64, 224), (128, 256, 56), (512, 512, 14)):
        yield square(16, inputs, outputs, edge, 3)
    for inputs, outputs, edge in ((64, 64, 256), (256, 128, 128), (1024, 512, 32)):
        yield square(4, inputs, outputs, edge, 3)
    for channels, edge in ((32, 112), (128, 56), (512, 14)):
        yield square(32, channels, channels, edge, 3, groups=channels)
    for inputs, outputs, edge in ((1, 32, 64), (32, 64, 32), (64, 128, 16)):
        yield square(2, inputs, outputs, edge, 3, dimensions=3)


def built_in():
    """The convolutions of these networks, in each direction, type and layout."""
    shapes = [*residual(1), *residual(8), *residual(32), *others()]
    for kind in ("float32", "float16", "bfloat16"):
        for layout in LAYOUTS:
            for shape in shapes:
                for operation in OPERATIONS:
                    yield problem(operation, kind, layout, *shape)


def workspace(words):
    """Bytes that a convolution takes for itself while it runs."""
    operation, kind, layout, *sizes, groups = PROBLEM.search(words).groups()
    x, w, pad, stride, dilation = ([int(n) for n in size.split("x")] for size in sizes)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(x))
    order = last if layout == "nhwc" and last else torch.contiguous_format

    def tensor(size):
        return torch.zeros(size, dtype=TYPES[kind], device="cuda").contiguous(memory_format=order)

    x, w, zeros = tensor(x), tensor(w), [0] * len(pad)
    args = (stride, pad, dilation, False, zeros, int(groups))
    y = torch.ops.aten.convolution(x, w, None, *args)
    mask = [operation == "backward_data", operation == "backward_filter", False]

    def run():
        if operation == "forward":
            return torch.ops.aten.convolution(x, w, None, *args)
        return torch.ops.aten.convolution_backward(y, x, w, None, *args, mask)

    def requested(which):
        return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    result = run()
    taken = requested("peak") - requested("current")
    assert requested("current") > before, "the operator returned nothing on the device"
    del result
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=Path, metavar="FILE", help="the convolutions of this text")
    options = parser.parse_args()
    if options.shapes is None:
        wanted = list(dict.fromkeys(built_in()))
    else:
        wanted = list(dict.fromkeys(m.group() for m in PROBLEM.finditer(options.shapes.read_text())))
        if not wanted:
            sys.exit(f"{options.shapes} names no convolution")
    version = torch.backends.cudnn.version()
    scale = 10_000 if version >= 90_000 else 1000
    cudnn = f"{version // scale}.{version % scale // 100}.{version % 100}"
    print(f"# PyTorch {torch.__version__}; bytes, and the convolution that took them")
    print(f"device {torch.cuda.get_device_name()}, cudnn {cudnn}")
    for words in wanted:
        try:
            print(workspace(words), words, flush=True)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            print(f"# not measured: {words}: {first}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
