"""The ranks of a stage: how a process joins them, and how models are loaded into their shards.

A single process needs no launcher. With several ranks, every rank runs the same stage and computes its part
of each step. Under ZeRO 3 a network is divided among the ranks while it is loaded (`sharded_loading`), so
that no rank ever holds all of it. DeepSpeed is imported only when it is first needed, because the import
takes seconds.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import HashStore

from components.core import records, stage_params
from components.core.errors import UserError

# Elements of a tensor that are summed over the ranks at once.
SUMMED_ELEMENTS = 2**24


@dataclass(frozen=True)
class World:
    """Rank of this process, number of ranks, and the device that this rank computes on.

    `sequence_parallel` consecutive ranks are a group that shares the tokens of each forward pass.
    """

    rank: int
    size: int
    device: torch.device
    sequence_parallel: int = 1

    @property
    def group(self) -> int:
        return self.rank // self.sequence_parallel

    @property
    def groups(self) -> int:
        return self.size // self.sequence_parallel

    @property
    def part(self) -> int:
        """Return the number of the slice of each sequence that this rank computes."""
        return self.rank % self.sequence_parallel

    def sum(self, tensor: Tensor) -> Tensor:
        """Add the tensors of the other ranks to `tensor`, in place, and return it; every rank must call this.

        The sum is exact for elements that are 0 on all ranks but one.
        """
        if self.size > 1:
            for part in tensor.view(-1).split(SUMMED_ELEMENTS):
                moved = part.to(self.device)
                distributed.all_reduce(moved)
                part.copy_(moved)
        return tensor

    def barrier(self) -> None:
        distributed.barrier()


def join_world(device: records.Device, settings: stage_params.Engine) -> World:
    """Join the launcher's process group, or make one of only this process if there is no launcher.

    Returns the World of this rank. engine.collective_seconds limits the duration of every collective.
    DeepSpeed's default of 10 minutes is too short, because the other ranks wait in a collective while rank 0
    samples. Raises UserError if the number of ranks is not a multiple of engine.sequence_parallel.
    """
    os.environ.setdefault("LOCAL_RANK", "0")
    target = torch.device("cpu" if device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}")
    if target.type == "cuda":
        torch.cuda.set_device(target)
    if not distributed.is_initialized():
        backend = "gloo" if target.type == "cpu" else "nccl"
        timeout = timedelta(seconds=settings.collective_seconds)
        if "WORLD_SIZE" in os.environ:
            distributed.init_process_group(backend, timeout=timeout)
        else:
            distributed.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    size, shared = distributed.get_world_size(), settings.sequence_parallel
    if size % shared:
        raise UserError(
            f"engine.sequence_parallel: {size} ranks cannot be divided into groups of {shared}; "
            "start a multiple of it, or lower it."
        )
    return World(distributed.get_rank(), size, target, shared)


def drop_unsearchable_folders() -> None:
    """Remove from PATH the folders in which this account has no permission to search.

    An account that `su NAME` started from root has root's PATH. A program that is not installed, such as the
    numactl that DeepSpeed looks for, would then raise PermissionError instead of FileNotFoundError, which
    DeepSpeed expects.
    """
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    closed = [folder for folder in folders if not os.access(folder or ".", os.X_OK, effective_ids=True)]
    os.environ["PATH"] = os.pathsep.join(folder for folder in folders if folder not in closed)


def import_deepspeed(device: records.Device) -> Any:
    """Import and return DeepSpeed, set up to log to standard error and to compile nothing."""
    drop_unsearchable_folders()
    os.environ.setdefault("DS_ACCELERATOR", device)
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if device == "cpu" and get_accelerator().device_name() != "cpu":
        # If another package (accelerate, for instance) has imported DeepSpeed before on a machine with a GPU,
        # DeepSpeed has chosen the GPU.
        set_accelerator(CPU_Accelerator())
    # On cpu DeepSpeed compiles a shared-memory all-reduce (about a minute) when it first communicates, unless
    # this table says that it cannot be built.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.WARNING)  # below it, each engine prints the memory in use several times
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    return deepspeed


def deepspeed_config(
    settings: stage_params.Engine, *, gradient_clip: float = 0.0, bucket: int = 500_000_000
) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    A step's gradient is scaled down to the norm `gradient_clip` if its norm is larger; 0 means no limit. At
    most `bucket` elements of gradients are summed over the ranks at once.
    """
    zero: dict[str, Any] = {
        "stage": settings.zero_stage,
        "overlap_comm": False,
        "reduce_bucket_size": bucket,
    }
    if settings.cpu_offload and settings.zero_stage > 0:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Micro-batches are packed by tokens, so their number varies and `step` decides when a step ends.
        "managed_gradient_accumulation": False,
        # Set explicitly, because DeepSpeed's default is 1.0 from version 0.19.3 on and was off before.
        "gradient_clipping": gradient_clip,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        # DeepSpeed's default is the model's precision. In bfloat16 a sum ignores gradients of less than
        # 1/512 of it, and most are in a step of a hundred micro-batches.
        "data_types": {"grad_accum_dtype": "fp32"},
        "sequence_parallel_size": settings.sequence_parallel,
        "zero_optimization": zero,
        # torch's AdamW everywhere, because DeepSpeed would compile its own optimizer for the cpu.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


@contextlib.contextmanager
def sharded_loading(settings: stage_params.Engine, device: records.Device) -> Iterator[None]:
    """Return a context in which transformers divides the models that it loads among the ranks, under ZeRO 3.

    Every rank must enter it and load the same models. Rank 0 reads the files, one tensor at a time goes to
    all ranks, and each rank keeps its part.
    """
    if settings.zero_stage < 3:
        yield
        return
    join_world(device, settings)
    import_deepspeed(device)
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    config = HfDeepSpeedConfig(deepspeed_config(settings))  # transformers keeps only a weak reference to it
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del config
