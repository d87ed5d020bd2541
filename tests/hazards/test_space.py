"""A recorder in trouble is nothing that the program notices: not in `errno`, not in its files, not
in a child of its own."""

import re

import hazard
import pytest
import support
from test_room import needs_mounts


@pytest.fixture
def space(programs, gpu, tmp_path):
    """Runs the program, its box in a file system of so many kilobytes (none: where it would go)."""

    def run(*arguments, kilobytes=None, code=0, **more):
        out = tmp_path / "out"
        command = [programs / "space", *map(str, arguments)]
        env = {**gpu, "MEMTRACE_OUT": str(out), "MEMTRACE_STACKS": "all", **more}
        env["LD_PRELOAD"] = f"{support.LIBRARY}:{programs / 'liblockfree.so'}"
        if kilobytes:
            box = tmp_path / "box"
            box.mkdir()
            env["MEMTRACE_BLACKBOX"] = str(box)
            script = f"mount -t tmpfs -o size={kilobytes}k tmpfs '{box}'; exec \"$@\""
            command = ["unshare", "-m", "bash", "-c", script, "run", *command]
        done = support.must(support.execute(command, env=env, cwd=tmp_path, timeout=120), code=code)
        assert done.stdout.splitlines()[-1:] == ["ok"], done
        return done, [support.load(path) for path in support.files(out)]

    return run


@needs_mounts
@pytest.mark.parametrize("kilobytes", [None, 1200, 4096])
@pytest.mark.parametrize("how", ["none", "closed", "jail", "both", "memory", "first-memory", "stderr"])
def test_errno_stays_as_it_is(how, kilobytes, space):
    """Also while the box grows, cannot grow, is reached without a
    descriptor, or in another root folder."""
    space("calls", how, 30_000, kilobytes=kilobytes)


@needs_mounts
@pytest.mark.parametrize("kilobytes", [40, 300, 600, 800, 1000, 1200, 1500, 1700, 2000])
def test_a_tiny_folder_has_a_whole_box_or_none(kilobytes, space):
    """There were no stacks at all, and nobody said so; and what could not begin stayed mapped."""
    done, [snapshot] = space("calls", "small", 100, kilobytes=kilobytes)
    stacks = snapshot["memtrace"]["stacks"]
    assert "problem" not in stacks and stacks["nodes"] > 2, stacks
    mapped = int(re.search(r"mapped (\d+)", done.stdout)[1])
    said = "no black box file could be made" in done.stderr
    assert mapped == (0 if said else 1), done


def test_the_child_of_a_fork_ends(space, tmp_path):
    """Another thread of the parent's was just writing a snapshot."""
    space("fork", tmp_path)


def run(programs, tmp_path, *arguments):
    command = [programs / "space", *arguments]
    done = support.must(support.record(command, tmp_path / "out", cwd=tmp_path))
    assert done.stdout == "ok\n"
    return done


def test_addresses_where_nothing_is(programs, tmp_path):
    """The kernel says so, and the program goes on; what did start is named."""
    done = run(programs, tmp_path, "start")
    assert re.findall(r"memtrace:   (.*)", done.stderr) == ["/bin/true"], done.stderr


def test_another_root_folder_gets_no_list(programs, tmp_path):
    jail = tmp_path / "jail"
    inside = jail / str(tmp_path / "out").lstrip("/")
    inside.mkdir(parents=True)
    run(programs, tmp_path, "elsewhere", jail)
    assert list(inside.iterdir()) == []
