"""Programs that a run starts without memtrace in them: the run says so at
its end."""

import re

import pytest
import support

TAKE = "import ctypes; c = ctypes.CDLL('libcuda.so.1'); print('ran')"
PRELUDE = f"""
import ctypes, os, subprocess, sys
TAKE = {TAKE!r}
CHILD = [sys.executable, "-c", TAKE]
c = ctypes.CDLL(None)
without = {{k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}}
def wait(pid): assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
def become(how):
    pid = os.fork()
    if pid == 0: how(); os._exit(9)
    wait(pid)
def unset(): del os.environ["LD_PRELOAD"]
def block(env): return (ctypes.c_char_p * (len(env) + 1))(*("=".join(pair).encode() for pair in env.items()))
def words(*args): return [*(a.encode() for a in args), None]
"""

# What a program does; whether the number of the process is known.
WAYS = {
    "subprocess": ("subprocess.run(CHILD, env=without, check=True)", True),
    "subprocess, replaced": (
        "subprocess.run(CHILD, env={**without, 'LD_PRELOAD': os.environ['LD_PRELOAD'].split(':')[1]}, check=True)",
        True,
    ),
    "env -u": ("subprocess.run(['env', '-u', 'LD_PRELOAD', *CHILD], check=True)", True),
    "env -i": ("subprocess.run(['env', '-i', 'LD_LIBRARY_PATH=' + os.environ['LD_LIBRARY_PATH'], *CHILD], check=True)", True),
    "a shell": (
        "subprocess.run(['sh', '-c', 'LD_PRELOAD=$(echo $LD_PRELOAD | cut -d: -f2) \"$@\"', 'sh', *CHILD], check=True)",
        True,
    ),
    "posix_spawn": ("wait(os.posix_spawn(sys.executable, CHILD, without))", False),
    "execve": ("become(lambda: os.execve(sys.executable, CHILD, without))", True),
    "execvp": ("become(lambda: (unset(), c.execvp(words(*CHILD)[0], (ctypes.c_char_p * 4)(*words(*CHILD)))))", True),
    "execl": ("become(lambda: (unset(), c.execl(*words(sys.executable, *CHILD))))", True),
    "execle": ("become(lambda: c.execle(*words(sys.executable, *CHILD), block(without)))", True),
    "execle, many words": (
        "become(lambda: c.execle(*words(sys.executable, *CHILD, *map(str, range(40))), block(without)))",
        True,
    ),
    "execle, few words": ("become(lambda: c.execle(*words('/bin/true', 'import ctypes'), block(without)) if print('ran', flush=True) is None else 0)", True),
    "system": ("unset(); assert c.system(f'{sys.executable} -c \"{TAKE}\"'.encode()) == 0", False),
    "popen": (
        "unset(); c.popen.restype = ctypes.c_void_p\n"
        "at = ctypes.c_void_p(c.popen(f'{sys.executable} -c \"{TAKE}\"'.encode(), b'w')); assert c.pclose(at) == 0",
        False,
    ),
}


def run(body, tmp_path, **options):
    program = tmp_path / "program.py"
    program.write_text(f"{PRELUDE}\n{body}\n")
    return support.must(support.record([support.PYTHON, program], tmp_path / "out", **options))


@pytest.mark.parametrize("way", WAYS)
def test_a_child_without_the_library_is_named(way, tmp_path):
    body, known = WAYS[way]
    done = run(body, tmp_path)
    assert "ran" in done.stdout
    assert "not recorded, because LD_PRELOAD was replaced or cleared" in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("memtrace:   ")]
    assert ("python" if way.startswith(("execl", "execle")) and "few" not in way else "import ctypes") in line and bool(re.search(r"\(process \d+\)$", line)) == known, line
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.endswith(".run")]


def test_children_that_have_it_and_programs_that_are_not_there_are_not(tmp_path):
    """Nor anything else of a program that starts others: what it hears of
    them is what the C library says."""
    body = (
        "subprocess.run(CHILD, check=True)\n"
        "for path in ('/nowhere/program', 'no-such-program'):\n"
        "    try: subprocess.run([path], env=without); assert False\n"
        "    except FileNotFoundError: pass\n"
        "ctypes.set_errno(0); own = ctypes.CDLL(None, use_errno=True)\n"
        "assert own.execve(b'/nowhere/program', (ctypes.c_char_p * 1)(), None) == -1 and ctypes.get_errno() == 2\n"
        "import ctypes.util; ctypes.util.find_library('cuda')  # starts ldconfig without an environment: it is static\n"
        "assert c.system(b'exit 3') == 3 << 8\n"
        "assert subprocess.run(['sh', '-c', 'kill -9 $$']).returncode == -9\n"
    )
    body += (
        "become(lambda: c.execle(*words(sys.executable, *CHILD), block(dict(os.environ))))\n"
        "assert own.execle(b'/nowhere/program', b'program', None, block(without)) == -1 and ctypes.get_errno() == 2\n"
    )
    done = run(body, tmp_path)
    assert "not recorded" not in done.stderr, done.stderr


def test_many_are_counted(tmp_path):
    body = "for _ in range(12): subprocess.run(['true'], env=without, check=True)"
    done = run(body, tmp_path)
    assert len(re.findall(r"memtrace:   true \(process \d+\)", done.stderr)) == 10 and "and 2 more" in done.stderr
    quiet = run(body, tmp_path, env={"MEMTRACE_QUIET": "1"})
    assert "not recorded, because" not in quiet.stderr


def test_names_are_no_lines_of_the_terminal(tmp_path):
    body = "subprocess.run(['true', 'a\\nmemtrace: made up\\x1b[31m'], env=without, check=True)"
    done = run(body, tmp_path)
    assert "\x1b" not in done.stderr and "\nmemtrace: made up" not in done.stderr and "true a?memtrace" in done.stderr


