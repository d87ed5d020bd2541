"""Pythons that memtrace doesn't know: native frames, the reason said once, and nothing of theirs is touched.

`programs/interpreter.c` exports what CPython does and ends where it is asked for more than its version.
"""

import pytest
import support

UNKNOWN = "this version of Python is not known to memtrace"
FREE_THREADED = "free-threaded Python is not supported"
ANOTHER_BUILD = "this build of Python lays its objects out in another way"


@pytest.mark.parametrize(
    ("version", "free_threaded", "why"),
    [
        ("030800f0", 0, UNKNOWN),
        ("030d00f0", 0, ANOTHER_BUILD),
        ("030d00f0", 1, FREE_THREADED),
        ("030e00f0", 0, UNKNOWN),
        ("030e02f0", 1, UNKNOWN),
        ("030f00a1", 0, UNKNOWN),
        ("040000f0", 0, UNKNOWN),
    ],
)
@pytest.mark.parametrize("stacks", ["all", "python"])
def test_an_interpreter_that_is_not_known(programs, gpu, tmp_path, version, free_threaded, why, stacks):
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path), "MEMTRACE_STACKS": stacks}
    done = support.must(support.execute([programs / "interpreter", version, str(free_threaded)], env=env))
    assert done.stdout == "ok\n"
    assert done.stderr.count(why) == 1, done.stderr
    found = support.load(support.only_file(tmp_path))
    assert found["memtrace"]["stacks"]["python"] == why
    taken = [e for e in found["device_traces"][0] if e["action"] == "segment_alloc"]
    assert len(taken) == 100
    for event in taken:
        names = [frame["name"] for frame in event["frames"]]
        if stacks == "all":
            assert names[0] == "evaluate" and "main" in names and names[-1] != f"[{why}]"
        else:
            # The caller is always there, since whose memory it is follows from it.
            assert names == ["evaluate"]
