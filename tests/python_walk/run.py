#!/usr/bin/env python3
"""Is the Python stack that memtrace reads, without the GIL, the one that the interpreter has?

Runs in the interpreter that is to be checked (CPython 3.9 to 3.13; on any other it checks that
memtrace says so). Each check makes calls of one kind. libmemtrace takes the stack in the
innermost one, with the GIL held or released at random. The check compares it with what
`sys._getframe` saw there: names, files and lines, frame by frame. Names are asked for at the end,
when most of the code objects are gone.

    python tests/python_walk/run.py [--library libmemtrace.so] [check ...]
    python tests/python_walk/run.py --all        # every CPython that can be found

Exit code: 0 all equal, 1 not, 2 could not run.
"""

import argparse
import os
import shutil
import subprocess
import sys
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
from harness import PYTHON, Bench, Library
from threads_and_native import among_native, evaluations, remembered, resumed, shorter, unchanged, without_state
from trees import call_trees, forked, threads

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = [(3, minor) for minor in range(9, 14)]

# In the order in which they run; each takes a Bench.
CHECKS = [
    recursion, generators, expressions, exceptions, objects, executed, coroutines, callbacks, traced, names,
    long_functions, reused_addresses, call_trees, threads, forked, without_state, unchanged, remembered, evaluations, resumed,
    shorter, among_native, shutdown, daemons,
]


def unsupported(library):
    """On any other Python: no frames, and the reason."""
    frames = library.names(library.held.memtrace_debug_capture(PYTHON))
    reasons = {
        "[this version of Python is not known to memtrace]",
        "[this build of Python lays its objects out in another way]",
        "[free-threaded Python is not supported]",
    }
    assert len(frames) == 1 and frames[0][0] in reasons, frames
    return frames[0][0]


def find_library():
    if os.environ.get("MEMTRACE_LIBRARY"):
        return os.environ["MEMTRACE_LIBRARY"]
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [p for p in (target / kind / "libmemtrace.so" for kind in ("release", "debug")) if p.exists()]
    if not built:
        die(f"no libmemtrace.so in {target}/release or {target}/debug: run cargo build, or name one with --library")
    return str(max(built, key=lambda p: p.stat().st_mtime))


def find_pythons():
    """Every CPython of a supported version: from MEMTRACE_PYTHON3_<minor>,
    pyenv, or the search path."""
    found = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in SUPPORTED:
        name = "python%d.%d" % version
        candidates = [os.environ.get("MEMTRACE_PYTHON%d_%d" % version)]
        candidates += sorted(str(p) for p in pyenv.glob(f"*/bin/{name}"))
        candidates.append(shutil.which(name))
        works = [c for c in candidates if c and subprocess.run([c, "-c", "import ctypes"], capture_output=True).returncode == 0]
        if works:
            found[version] = works[0]
    return found


def run_all(library):
    found, failed = find_pythons(), []
    for version in SUPPORTED:
        if version not in found:
            print("python walk: 3.%d not found, skipped (set MEMTRACE_PYTHON3_%d to its path)" % (version[1], version[1]))
        elif subprocess.run([found[version], __file__, "--library", library]).returncode != 0:
            failed.append(version)
    print(f"python walk: {len(found) - len(failed)} of {len(found)} versions of CPython agree")
    return 1 if failed or not found else 0


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
    if sys.version_info[:2] not in SUPPORTED:
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
