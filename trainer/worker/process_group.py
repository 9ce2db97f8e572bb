"""Joins this rank to the others: NCCL on GPUs, gloo on the CPU."""

from __future__ import annotations

import os

import deepspeed
import torch
import torch.distributed

from llmtop.trainer.worker.place import Place


def join_process_group(place: Place, *, on_cpu: bool) -> torch.device:
    """The device of this rank, with the default process group up on it."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit():
        torch.set_num_threads(int(threads))
    if on_cpu:
        # Otherwise init_distributed compiles a shared-memory collective for minutes on its first use.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        device = torch.device("cpu")
        torch.distributed.init_process_group("gloo", rank=place.rank, world_size=place.world_size)
        backend = "gloo"
    else:
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        backend = "nccl"
        # With a device id NCCL connects now and to this device only.
        torch.distributed.init_process_group(
            backend, rank=place.rank, world_size=place.world_size, device_id=device
        )
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return device


def leave_process_group(device: torch.device) -> None:
    """Wait until no rank needs this one any more. The process must end right after."""
    torch.distributed.barrier()
    # Gloo's groups are left to the end of the process: taking them down can abort it.
    if device.type == "cuda":
        torch.distributed.destroy_process_group()
