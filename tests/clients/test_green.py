"""Green contexts: there like any other, and what is allocated under one is its device's."""

import client
import support

PROGRAM = """
import ctypes
cuda = ctypes.CDLL(None)
ref, green, context, at = ctypes.byref, ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
cuda.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
cuda.cuGreenCtxDestroy.argtypes = [ctypes.c_void_p]
def must(code): assert code == 0, code
must(cuda.cuInit(0))
must(cuda.cudaMalloc(ref(at), ctypes.c_size_t(512)))
must(cuda.cuGreenCtxCreate(ref(green), None, 1, 0))
must(cuda.cuCtxFromGreenCtx(ref(context), green))
must(cuda.cuCtxSetCurrent(context))
must(cuda.cuMemHostAlloc(ref(at), ctypes.c_size_t(512), 0))
must(cuda.cuMemAlloc_v2(ref(at), ctypes.c_size_t(4096)))
must(cuda.memtrace_dump(b"{out}/there.json"))
must(cuda.cuGreenCtxDestroy(green))
must(cuda.memtrace_dump(b"{out}/gone.json"))
"""


def test_green_contexts(programs, gpu, tmp_path):
    ours, rest = gpu["LD_PRELOAD"].split(":", 1)
    env = {**gpu, "LD_PRELOAD": f"{ours}:{programs / 'libgreen.so'}:{rest}", "MEMTRACE_OUT": str(tmp_path)}
    support.must(support.execute([support.PYTHON, "-c", PROGRAM.replace("{out}", str(tmp_path))], env=env))
    columns = [dict(zip(client.COLUMNS, client.ledger(tmp_path / f"{name}.json")[0]["1"])) for name in ("there", "gone")]
    assert [(c["contexts"], c["device_bytes"]) for c in columns] == [(1, 4096), (0, 4096)]
