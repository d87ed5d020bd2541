"""One of two ranks: pipeline parallel, by PyTorch (`torch`) or megatron-core (`megatron`), under a tracer with the plugins named.
Prints what came of it as JSON, with the rank."""

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist

import memtrace

how, *plugins = sys.argv[1:]
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
said = {"rank": rank}


def by_torch():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    part = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda()
    with memtrace.Tracer(part, plugins=plugins) as tracer:
        objects, gathered = [{"from": rank}], [None, None]
        dist.broadcast_object_list(objects, src=1)
        dist.all_gather_object(gathered, rank)
        said.update(broadcast=objects, gathered=gathered)
        stage = PipelineStage(part, rank, 2, torch.device("cuda", rank))
        schedule = ScheduleGPipe(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
        if rank == 0:
            schedule.step(torch.randn(32, 64, device="cuda"))
        else:
            schedule.step(target=torch.randn(32, 64, device="cuda"))
    return tracer


def by_megatron():
    warnings.filterwarnings("ignore")
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    config = ModelParallelConfig(
        pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, variable_seq_lengths=True, batch_p2p_comm=False
    )
    said["received"] = []
    with memtrace.Tracer(plugins=plugins) as tracer:
        stage = P2PCommunicator(dist.group.WORLD, config)
        for length in (64, 96):
            if rank == 0:
                stage.send_forward(torch.ones(length, 2, 128, device="cuda"), False)
            else:
                said["received"].append(list(stage.recv_forward((1, 1, 1), False).shape))
    return tracer


original = dist.send_object_list
report = (by_torch if how == "torch" else by_megatron)().report()
said["put back"] = dist.send_object_list is original
said["plugins"] = report.plugins
said["phases"] = {name: list(devices) for name, devices in report.phases.items()}
# torchrun runs Python unbuffered, and `print` would write the line's end by itself: the other rank's line may come in between.
sys.stdout.write(json.dumps(said) + "\n")
sys.stdout.flush()
dist.destroy_process_group()
