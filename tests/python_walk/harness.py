"""What the checks share: the library, the interpreter's own view of a
stack, and the comparison of both."""

import ctypes
import json
import random
import sys
import threading

PYTHON, ALL = 1, 2
KEPT = 128  # frames kept of each end of a deep stack


class Library:
    """The library, once called with the GIL held and once without."""

    def __init__(self, path):
        self.path = path
        self.held, self.released = ctypes.PyDLL(path), ctypes.CDLL(path)
        for lib in (self.held, self.released):
            lib.memtrace_debug_capture.restype = ctypes.c_uint
            lib.memtrace_debug_names.restype = ctypes.c_size_t
            lib.memtrace_debug_names.argtypes = [ctypes.c_uint, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
            lib.memtrace_debug_cost.restype = ctypes.c_double
            lib.memtrace_debug_refused.restype = ctypes.c_uint64

    def names(self, stack, pytorch=False):
        """The frames of a stack as [name, file, line], innermost first."""
        size = self.released.memtrace_debug_names(stack, int(pytorch), None, 0)
        buf = ctypes.create_string_buffer(size + 1)
        self.released.memtrace_debug_names(stack, int(pytorch), buf, size)
        return [json.loads(row) for row in buf.raw[:size].decode().splitlines()]


class Bench:
    """Takes stacks, remembers the truth about each, and compares at the end."""

    def __init__(self, library):
        self.library = library
        self.taken = []
        self.compared = 0
        self.rng = random.Random(1)

    def here(self, *_):
        """Takes the caller's stack. Returns None, so that it can be anywhere."""
        lib = self.library.held if self.rng.random() < 0.5 else self.library.released
        stack = lib.memtrace_debug_capture(PYTHON)
        self.taken.append((stack, truth(sys._getframe(1))))

    def compare(self):
        """Compares everything taken since the last time; the first
        difference is an AssertionError."""
        known = {}
        taken, self.taken = self.taken, []
        for stack, expect in taken:
            frames = known.get(stack)
            if frames is None:
                frames = known[stack] = self.library.names(stack)
            assert frames and frames[0][0] == "here", f"begins with {frames[:1]}"
            same(frames[1:], expect)
            self.compared += 1


def truth(frame):
    """The interpreter's view of a frame and its callers."""
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append([shown(code.co_name), shown(code.co_filename), frame.f_lineno or 0])
        frame = frame.f_back
    return frames


def shown(text):
    """A name as memtrace writes it: half surrogates, which no UTF-8 has, become U+FFFD."""
    return "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)


def same(frames, expect):
    if len(expect) + 1 > 2 * KEPT:
        cut = len(frames) - KEPT
        assert frames[cut - 1][0] == "[frames left out]", f"no gap in {len(frames)} of {len(expect)} frames"
        expect = expect[: KEPT - 1] + expect[-KEPT:]
        frames = frames[: cut - 1] + frames[cut:]
    for i, (got, want) in enumerate(zip(frames, expect)):
        assert got == want, f"frame {i} is {got}, should be {want}"
    assert len(frames) == len(expect), f"{len(frames)} frames, should be {len(expect)}"


def in_thread(f):
    thread = threading.Thread(target=f)
    thread.start()
    thread.join()
