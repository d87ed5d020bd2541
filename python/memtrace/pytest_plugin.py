"""pytest: limits on what a test takes from the GPU, and on what it leaves behind.

    @pytest.mark.limit_gpu_memory("2 GiB")          # the most that is allocated while the test runs
    @pytest.mark.limit_gpu_leaks("1 MiB")           # what is allocated more after it than before; "0 B" if left out

`--gpu-leaks SIZE` checks every test so. Run the tests as `memtrace run -- pytest`:
a limit that can't be measured is a failure, not a pass. Without CUDA there is
nothing to measure, and tests run as ever.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, Generator

import pytest

from ._library import is_loaded
from .recording import HOW, parse_size, peak, size


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("memtrace")
    group.addoption("--gpu-leaks", metavar="SIZE", help="fail each test that leaves more GPU memory behind than this")


def pytest_configure(config: pytest.Config) -> None:
    limits = "limit_gpu_memory(size, device=0): fail if more GPU memory is allocated at once than this"
    leaks = "limit_gpu_leaks(size=0, device=0): fail if the test leaves more GPU memory behind than this"
    for line in (limits, leaks):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    limit = item.get_closest_marker("limit_gpu_memory")
    leaks = item.get_closest_marker("limit_gpu_leaks")
    every = item.config.getoption("--gpu-leaks", default=None)
    if limit is None and leaks is None and every is None:
        return (yield)
    device = int(next((m.kwargs["device"] for m in (limit, leaks) if m and "device" in m.kwargs), 0))
    most = _argument(limit, None) if limit is not None else None
    left = _argument(leaks, 0) if leaks is not None else (parse_size(every) if every is not None else None)
    if not is_loaded():
        if _has_cuda():
            raise pytest.fail.Exception(f"memtrace is not in this process, so its GPU memory can't be limited: {HOW}")
        return (yield)
    gc.collect()
    with peak(device) as measured:
        result = yield
    if most is not None and measured.peak > most:
        pytest.fail(f"{size(measured.peak)} of GPU memory were allocated at once, the limit is {size(most)}", pytrace=False)
    if left is not None and measured.kept > left:
        # A cycle that the collector has not come to is no leak.
        gc.collect()
        kept = _allocated(device) - (measured.usage.before if measured.usage else 0)
        if kept > left:
            pytest.fail(f"the test left {size(kept)} of GPU memory behind, the limit is {size(left)}", pytrace=False)
    return result


def _argument(mark: Any, default: int | None) -> int:
    given = mark.args[0] if mark.args else mark.kwargs.get("size", default)
    if given is None:
        raise pytest.UsageError("limit_gpu_memory needs a size, such as limit_gpu_memory('2 GiB')")
    return parse_size(given)


def _allocated(device: int) -> int:
    from ._native import native

    known = native()
    return known.memory(device)[0] if known is not None else 0


def _has_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())
