"""One rank of a job in which several libraries take a known amount of GPU
memory. See scripts/who_has_the_rest."""

import ctypes
import os
import sys

import torch
import torch.distributed as dist

MIB = 1 << 20
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")


def take_from_nccl(size):
    at = ctypes.c_void_p()
    assert ctypes.CDLL("libnccl.so.2").ncclMemAlloc(ctypes.byref(at), ctypes.c_size_t(size)) == 0


def take_in_extension(size):
    take = ctypes.CDLL(sys.argv[1]).take
    take.argtypes = [ctypes.c_size_t]
    assert take(size) == 0


tensor = torch.zeros(100 * MIB, dtype=torch.uint8, device="cuda")
weights = torch.zeros(64, 64, device="cuda")
weights @ weights  # cuBLAS gets its workspace: CUBLAS_WORKSPACE_CONFIG says how much
take_from_nccl(48 * MIB)
take_in_extension(24 * MIB)
if rank == 1:
    torch.cuda.synchronize(0)  # a stray context: this rank has no business on device 0

dist.barrier()
ctypes.CDLL(None).memtrace_dump(os.path.join(sys.argv[2], f"rank{rank}.pickle").encode())
dist.destroy_process_group()
