"""What a virtual GPU knows of cuDNN's workspaces, and that it says what it doesn't know (issue F, B17)."""

import json
import re

import pytest
import support

# A convolution with all three directions of it, planned twice: forward, the input's gradient, the filter's.
LAYER = """
import time, torch
layer = torch.nn.Conv2d(4, 6, 3, dtype=torch.float64).cuda()
for _ in range(2):
    layer(torch.randn(2, 4, 9, 9, dtype=torch.float64, device="cuda", requires_grad=True)).sum().backward()
time.sleep(0.5)  # PyTorch aborts if its backward thread still works when Python ends
"""


def run(code, out, spec="t4", env=None, record="on"):
    """Runs code on a virtual GPU: what it said on standard error, and what its snapshot tells of cuDNN."""
    command = ["run", "--virtual", spec, "--out", out, "--record", record, "--", support.PYTHON, "-c", code]
    done = support.must(support.memtrace(*command, env=env))
    if record == "off":
        return done.stderr, None
    (path,) = support.files(out)
    return done.stderr, path


def told(path):
    """The summary's and the report's words and numbers about workspaces."""
    numbers = json.loads(support.must(support.memtrace("summary", path, "--json")).stdout)["estimate"]["cudnn"]
    texts = [support.must(support.memtrace(verb, path)).stdout for verb in ("summary", "report")]
    return numbers, texts


@pytest.mark.parametrize("interface", ["backend", "older"])
def test_what_is_not_known_is_said(interface, tmp_path):
    """Double precision isn't modelled: each direction counts once, by whichever interface cuDNN is asked."""
    env = {"TORCH_CUDNN_V8_API_DISABLED": "1"} if interface == "older" else {}
    stderr, path = run(LAYER, tmp_path, env=env)
    line = "lower bound: 3 convolutions without workspace"
    assert stderr.count("lower bound") == 1 and line in stderr, stderr
    numbers, texts = told(path)
    assert numbers["unknown"] == 3, numbers
    assert all(text.count(line) == 1 for text in texts), texts


def test_without_a_convolution_nothing_is_said(tmp_path):
    stderr, path = run("import torch; torch.nn.Linear(8, 8).cuda()(torch.ones(2, 8, device='cuda'))", tmp_path)
    assert "lower bound" not in stderr, stderr
    numbers, texts = told(path)
    assert numbers is None, numbers
    assert not any(re.search("without workspace|lower bound", text) for text in texts), texts
