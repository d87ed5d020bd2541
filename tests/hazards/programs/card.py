"""A process on a virtual card that takes a command a line and answers each with a line.

No PyTorch: it asks the runtime and NVML by ctypes, so that dozens of it can run.
"""

import ctypes
import os
import signal
import sys
import threading

cuda, nvml = ctypes.CDLL("libcudart.so.13"), ctypes.CDLL("libnvidia-ml.so.1")
blocks = []


def take(mib):
    """The runtime's code: 0, or 2 for out of memory."""
    place = ctypes.c_void_p()
    code = cuda.cudaMalloc(ctypes.byref(place), ctypes.c_size_t(int(mib) << 20))
    if code == 0:
        blocks.append(place)
    return code


def fill(mib):
    """How often that much fits."""
    count = 0
    while take(mib) == 0:
        count += 1
    return count


def give():
    return cuda.cudaFree(blocks.pop())


def free():
    """MiB, as CUDA says."""
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cudaMemGetInfo(ctypes.byref(left), ctypes.byref(total)) == 0
    return left.value >> 20


def card(number):
    handle = ctypes.c_void_p()
    assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByIndex_v2(int(number), ctypes.byref(handle)) == 0
    return handle


def used(number=0):
    """MiB, as NVML says."""
    memory = (ctypes.c_uint64 * 3)()
    assert nvml.nvmlDeviceGetMemoryInfo(card(number), memory) == 0
    return memory[2] >> 20


def processes(number=0):
    """`PID:MIB …`, as NVML says."""

    class Process(ctypes.Structure):
        _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_uint64), ("parts", ctypes.c_uint * 2)]

    found, count = (Process * 64)(), ctypes.c_uint(64)
    assert nvml.nvmlDeviceGetComputeRunningProcesses_v3(card(number), ctypes.byref(count), found) == 0
    return " ".join(f"{p.pid}:{p.used >> 20}" for p in found[: count.value])


def export():
    handle = (ctypes.c_char * 64)()
    assert cuda.cudaIpcGetMemHandle(ctypes.byref(handle), blocks[-1]) == 0
    return bytes(handle).hex()


def open_handle(text):
    class Handle(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * 64)]

    place = ctypes.c_void_p()
    return cuda.cudaIpcOpenMemHandle(ctypes.byref(place), Handle.from_buffer_copy(bytes.fromhex(text)), 1)


def fork():
    """A child that can't use CUDA, tries, and ends as a program ends."""
    child = os.fork()
    if child == 0:
        sys.exit(take(1) if cuda.cudaGetLastError() is not None else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def shut():
    """Closes every descriptor but the three that it talks with."""
    os.closerange(3, 1 << 16)
    return 0


def clear():
    """An empty environment, but for a word of the program's own."""
    libc = ctypes.CDLL(None)
    return libc.clearenv() or libc.setenv(b"ANYTHING", b"1", 1)


def become(program, *args):
    print("soon", flush=True)  # whatever is said now is the new program's to read
    os.execvp(program, [program, *args])


def lose_main():
    """The thread that everybody knows ends, and another one goes on: the system says of such a process that it has ended."""
    more = threading.Thread(target=serve)
    more.start()
    print("soon", flush=True)
    ctypes.CDLL(None).syscall(60, 0)  # SYS_exit: this thread alone


def mortal():
    """A file beyond the limit ends it, as it ends programs that aren't Python's."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    return 0


def zombie():
    """A child with a context and 1 GiB of its own that is killed, and not waited for."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(into, str(take(1024)).encode())
        os.kill(os.getpid(), 9)
    assert os.read(out, 9) == b"0"
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    return child


def serve():
    for line in sys.stdin:
        name, *args = line.split()
        print(globals()[name](*args), flush=True)


if __name__ == "__main__":
    serve()
