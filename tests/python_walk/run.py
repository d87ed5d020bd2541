#!/usr/bin/env python3
"""Is the Python stack that memtrace reads, without the GIL, the one that the interpreter has?

Runs in the interpreter that is to be checked (a CPython that memtrace knows; on any other it checks
that memtrace says so). Each check makes calls of one kind. libmemtrace takes the stack in the
innermost one, with the GIL held or released at random. The check compares it with what
`sys._getframe` saw there: names, files and lines, frame by frame. Names are asked for at the end,
when most of the code objects are gone.

    python tests/python_walk/run.py [--library libmemtrace.so] [check ...]
    python tests/python_walk/run.py --all        # every CPython that can be found

Exit code: 0 all equal, 1 not, 2 could not run.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path

from calls import (
    callbacks,
    coroutines,
    exceptions,
    executed,
    expressions,
    generators,
    long_functions,
    names,
    objects,
    recursion,
    reused_addresses,
    traced,
)
from ends import daemons, shutdown
from harness import ALL, PYTHON, Bench, Library
from threads_and_native import among_native, evaluations, remembered, resumed, shorter, unchanged, without_state
from trees import call_trees, forked, threads

ROOT = Path(__file__).resolve().parents[2]
SOURCE = (ROOT / "crates/format/src/stacks.rs").read_text(encoding="utf-8")
OLDEST, NEWEST = map(int, re.search(r"PYTHONS: .* = (\d+)\.\.=(\d+);", SOURCE).groups())
SUPPORTED = [(3, minor) for minor in range(OLDEST, NEWEST + 1)]

# In the order in which they run; each takes a Bench.
CHECKS = [
    recursion, generators, expressions, exceptions, objects, executed, coroutines, callbacks, traced, names,
    long_functions, reused_addresses, call_trees, threads, forked, without_state, unchanged, remembered, evaluations, resumed,
    shorter, among_native, shutdown, daemons,
]


# Names under which a Python may be found that is not walked.
OTHERS = ["python3.6", "python3.7", "python3.8"] + [f"python3.{minor}t" for minor in range(13, NEWEST + 1)]
OTHERS += [f"python3.{minor}{kind}" for minor in range(NEWEST + 1, NEWEST + 4) for kind in ("", "t")]


def is_supported():
    return sys.version_info[:2] in SUPPORTED and not sysconfig.get_config_var("Py_GIL_DISABLED")


def unsupported(library):
    """On any other Python: native frames, and the reason where there are none."""
    reasons = {
        "[this version of Python is not known to memtrace]",
        "[this build of Python lays its objects out in another way]",
        "[free-threaded Python is not supported]",
    }
    capture = library.held.memtrace_debug_capture
    (frame,) = library.names(capture(PYTHON))
    assert frame[0] in reasons, frame
    everything = library.names(capture(ALL))
    assert len(everything) > 10 and any("Eval" in name for name, _, _ in everything), everything
    # Under native frames the reason would stand in every stack: the recorder says it once.
    assert not any(file == "memtrace" or file.endswith(".py") for _, file, _ in everything), everything
    return frame[0]


def find_library():
    if os.environ.get("MEMTRACE_LIBRARY"):
        return os.environ["MEMTRACE_LIBRARY"]
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [p for p in (target / kind / "libmemtrace.so" for kind in ("release", "debug")) if p.exists()]
    if not built:
        die(f"no libmemtrace.so in {target}/release or {target}/debug: run cargo build, or name one with --library")
    return str(max(built, key=lambda p: p.stat().st_mtime))


def find_python(name):
    """A Python of this name that works: from pyenv or the search path."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [os.environ.get("MEMTRACE_PYTHON" + name[len("python") :].replace(".", "_"))]
    candidates += sorted(str(p) for p in pyenv.glob(f"*/bin/{name}"))
    candidates.append(shutil.which(name))
    works = [c for c in candidates if c and subprocess.run([c, "-c", "import ctypes"], capture_output=True).returncode == 0]
    return works[0] if works else None


def run_all(library):
    """Every supported version that can be found, and what else there is, which must be refused."""
    found, failed = 0, 0
    for version in SUPPORTED:
        python = find_python("python%d.%d" % version)
        if not python:
            print("python walk: 3.%d not found, skipped (set MEMTRACE_PYTHON3_%d to its path)" % (version[1], version[1]))
            continue
        found += 1
        failed += subprocess.run([python, __file__, "--library", library]).returncode != 0
    others = [python for python in map(find_python, OTHERS) if python]
    refused = sum(subprocess.run([python, __file__, "--library", library]).returncode == 0 for python in others)
    print(f"python walk: {found - failed} of {found} versions of CPython agree, {refused} of {len(others)} others are refused")
    return 1 if failed or not found or refused < len(others) else 0


def die(text):
    print(f"run.py: {text}", file=sys.stderr)
    raise SystemExit(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", help="the libmemtrace.so to check (default: the newest one that cargo built)")
    parser.add_argument("--all", action="store_true", help="run on every supported CPython that can be found")
    parser.add_argument("checks", nargs="*", help="run only these checks")
    args = parser.parse_args()
    path = str(Path(args.library or find_library()).resolve())
    if args.all:
        return run_all(path)
    try:
        library = Library(path)
    except (OSError, AttributeError) as e:
        die(f"{path} cannot be used: {e}")
    version = "%d.%d.%d" % sys.version_info[:3]
    if not is_supported():
        print(f"python walk on {version}: {unsupported(library)}: ok")
        return 0
    unknown = set(args.checks) - {c.__name__ for c in CHECKS}
    if unknown:
        die(f"no such check: {', '.join(sorted(unknown))}; there are {', '.join(c.__name__ for c in CHECKS)}")
    warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what we check
    bench, failed, count = Bench(library), 0, 0
    for check in CHECKS:
        if args.checks and check.__name__ not in args.checks:
            continue
        count += 1
        before = bench.compared
        try:
            check(bench)
            bench.compare()
            assert bench.compared > before or check is unchanged, "nothing was compared"
        except Exception:
            failed += 1
            bench.taken.clear()
            print(f"FAILED {check.__name__}\n{traceback.format_exc()}", file=sys.stderr)
    refused = library.held.memtrace_debug_refused()
    if refused:
        failed += 1
        print(f"FAILED {refused} stacks or functions found no room", file=sys.stderr)
    word = "ok" if not failed else f"{failed} FAILED"
    print(f"python walk on {version}: {count} checks, {bench.compared:,} stacks compared: {word}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
