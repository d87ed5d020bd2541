"""The table of programs in `scripts/`: how each is run, and what it proves.

`compared` programs use PyTorch's native allocator and are compared with PyTorch's own
recorder (`oracle.py`); the others must only run. `real` says that the program also makes
sense on a real card (`scripts/gpu_check`).
"""

from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
H100 = "h100"


@dataclass(frozen=True)
class Program:
    """One way to run one script."""

    name: str
    script: str
    args: tuple = ()
    spec: str = H100
    env: dict = field(default_factory=dict)
    compared: bool = True
    real: bool = True
    devices: int = 1
    ranks: int = 1
    closing: str = ""  # how the last line that the script prints begins

    @property
    def path(self):
        return SCRIPTS / self.script

    def command(self, python, *oracle):
        """The command line; `oracle` is the part that runs it under the oracle, if any."""
        script = [*map(str, oracle), str(self.path), *self.args]
        if self.ranks == 1:
            return [str(python), *script]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        return [str(python), *torchrun, *script]


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ASYNC = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
LAZY = f"{H100},lazy"

PROGRAMS = [
    Program("elementwise", "elementwise.py", closing="kept 16 tensors"),
    Program("mlp", "mlp.py", closing="trained 6 steps"),
    Program("transformer", "transformer.py", closing="trained 4 steps of 4472320 parameters"),
    Program("convnet", "convnet.py", closing="trained two networks"),
    Program("lstm", "lstm.py", closing="trained 3 steps"),
    Program("sdpa", "sdpa.py", closing="ran ["),
    Program("amp", "amp.py", closing="trained in float16 and bfloat16"),
    Program("checkpointing", "checkpointing.py", closing="trained with three ways"),
    Program("streams-eager", "streams.py", closing="used 4 streams"),
    Program("streams-lazy", "streams.py", spec=LAZY, real=False, closing="used 4 streams"),
    Program("stream-events", "stream_events.py", closing="used 5 backward passes"),
    Program("stream-events-lazy", "stream_events.py", spec=LAZY, real=False, closing="used 5 backward passes"),
    Program("empty-cache", "empty_cache.py", closing="reserved"),
    Program("oom", "oom.py", closing="went on after"),
    Program("oom-small-card", "oom.py", spec="sm_80,6GiB,40SM", real=False, closing="went on after"),
    Program("two-devices", "two_devices.py", spec=f"{H100}*2", devices=2, closing="allocated on True True"),
    Program("pinned", "pinned.py", closing="copied 4 sizes both ways"),
    Program("mem-pools", "mem_pools.py", closing="pools done"),
    Program("mem-pools-expandable", "mem_pools.py", closing="pools done", env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    Program("cuda-graphs", "cuda_graphs.py", closing="captured and replayed"),
    Program("capture-frees", "capture_frees.py", closing="captured 12 graphs"),
    Program("capture-frees-lazy", "capture_frees.py", spec=LAZY, real=False, closing="captured 12 graphs"),
    Program("random-eager", "random_program.py", ("1",), closing="live"),
    Program("random-lazy", "random_program.py", ("2",), spec=LAZY, real=False, closing="live"),
    Program("backward-threads", "backward_threads.py", closing="ran backward in 4 threads"),
    Program("python-threads", "python_threads.py", closing="threads ended: 4"),
    Program("python-threads-lazy", "python_threads.py", spec=LAZY, real=False, closing="threads ended: 4"),
    Program("optimizers", "optimizers.py", closing="ran 17 optimizers"),
    Program("expandable", "expandable.py", env=EXPANDABLE, closing="segments"),
    Program("expandable-transformer", "transformer.py", env=EXPANDABLE, closing="trained 4 steps"),
    Program("expandable-random", "random_program.py", ("3", "20000"), env=EXPANDABLE, closing="live"),
    Program("compiled", "compiled.py", closing="compiled and trained 3 steps"),
    Program("dataloader", "dataloader.py", closing="trained 16 batches"),
    Program("sites", "sites.py", closing="allocated at 11 kinds of sites"),
    Program("save-load", "save_load.py", closing="saved"),
    Program("ddp", "ddp.py", spec=f"{H100}*2", devices=2, ranks=2, closing="rank"),
    Program("fsdp2", "fsdp2.py", spec=f"{H100}*2", devices=2, ranks=2, closing="rank"),
    Program("malloc-async", "malloc_async.py", env=ASYNC, compared=False, closing="allocated"),
]


def compared():
    """The programs whose history is compared with PyTorch's."""
    return [p for p in PROGRAMS if p.compared]
