"""The training engine: DeepSpeed behind a few methods, used in the same way on one core and on many GPUs.

A single process needs no launcher. With several ranks, every rank runs the same stage and computes its part
of each step. DeepSpeed is imported only when the first engine is made, because the import takes seconds.
"""

import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore

from components.core import params
from components.core.errors import UserError
from components.training.batches import Microbatch

# Betas of AdamW.
BETAS = (0.9, 0.95)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Loss = Callable[[nn.Module, Microbatch], Tensor]


class NotFinite(Exception):
    """Error raised if a loss, a gradient or a metric is NaN or infinite.

    The weights in memory may be NaN then, so they must not be used or saved. The message is a clause, such as
    "policy_loss is not a number".
    """


@dataclass(frozen=True)
class World:
    """Rank of this process, number of ranks, and the device that this rank computes on."""

    rank: int
    size: int
    device: torch.device

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over all ranks; every rank must call this.

        The sum is exact for elements that are 0 on all ranks but one.
        """
        moved = tensor.to(self.device)
        distributed.all_reduce(moved)
        return moved.to(tensor.device)

    def barrier(self) -> None:
        distributed.barrier()


def join_world(device: params.Device, timeout_seconds: float) -> World:
    """Join the launcher's process group, or make a group of only this process if there is no launcher.

    `timeout_seconds` limits every collective. DeepSpeed's default of 10 minutes is too short, because the
    other ranks wait in a collective while rank 0 samples.
    """
    os.environ.setdefault("LOCAL_RANK", "0")
    target = torch.device("cpu" if device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}")
    if target.type == "cuda":
        torch.cuda.set_device(target)
    if not distributed.is_initialized():
        backend, timeout = "gloo" if target.type == "cpu" else "nccl", timedelta(seconds=timeout_seconds)
        if "WORLD_SIZE" in os.environ:
            distributed.init_process_group(backend, timeout=timeout)
        else:
            distributed.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
    return World(distributed.get_rank(), distributed.get_world_size(), target)


def _deepspeed(device: params.Device) -> Any:
    """Import and return DeepSpeed, set up to log to standard error and to compile nothing."""
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
    for handler in logging.getLogger("DeepSpeed").handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    return deepspeed


class DeepSpeedEngine:
    """Network with its optimizer (torch's AdamW), distributed over the ranks with DeepSpeed's ZeRO 0 to 3."""

    def __init__(
        self, module: nn.Module, engine: params.Engine, *, device: params.Device, gradient_clip: float
    ):
        """Move `module` to the device and prepare it for training in place.

        Every rank must call this with equal weights.
        """
        self.world = join_world(device, engine.collective_seconds)
        self.settings = engine
        self.deepspeed = _deepspeed(device)
        module.to(self.world.device)
        if engine.activation_checkpointing:
            from transformers import PreTrainedModel

            for part in module.children():
                if isinstance(part, PreTrainedModel):
                    part.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.module = module
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=BETAS, weight_decay=0.0)
        self.engine, *_ = self.deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=self._config(gradient_clip, sum(parameter.numel() for parameter in parameters)),
        )

    def _config(self, gradient_clip: float, numel: int) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": self.settings.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": min(numel, 500_000_000),
        }
        if self.settings.cpu_offload and self.settings.zero_stage > 0:
            zero["offload_optimizer"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            # Micro-batches are packed by tokens, so their number varies and `step` decides when a step ends.
            "managed_gradient_accumulation": False,
            # Set explicitly, because DeepSpeed's default is 1.0 from version 0.19.3 on and was off before.
            "gradient_clipping": gradient_clip,
            "bf16": {"enabled": self.settings.dtype == "bfloat16"},
            # DeepSpeed's default is the model's precision. In bfloat16 a sum ignores gradients of less than
            # 1/512 of it, and most are in a step of a hundred micro-batches.
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": zero,
            # torch's AdamW everywhere, because DeepSpeed would compile its own optimizer for the cpu.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }

    def forward(self, ids: Tensor, action_mask: Tensor) -> tuple[Tensor, ...]:
        """Return the network's outputs, computed without gradients."""
        self.engine.eval()
        with torch.no_grad():
            outputs: tuple[Tensor, ...] = self.engine(ids, action_mask)
        return outputs

    def step(self, microbatches: Sequence[Microbatch], loss: Loss, *, learning_rate: float) -> float:
        """Take one optimizer step and return the gradient norm before clipping.

        `loss` must return a micro-batch's share of the step's loss: the sum over those tokens of the
        micro-batch that the policy sampled, divided by the number of such tokens in the whole step on all
        ranks. This method does not divide it again. The norm is NaN under ZeRO 0 with several ranks if
        DeepSpeed does not report it. Raises NotFinite if the norm is known and not finite.
        """
        self.engine.train()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        for microbatch in microbatches:
            share = loss(self.engine, microbatch)
            # DeepSpeed averages gradients over ranks, but the shares of all ranks must be summed.
            self.engine.backward(share * (self.world.size if microbatch.counted else 0))
        norm, is_known = self._local_norm(), self.settings.zero_stage > 0 or self.world.size == 1
        self.engine.step()
        reported = self.engine.get_global_grad_norm()
        norm = norm if reported is None else float(reported)
        # On an overflow in bfloat16 DeepSpeed skips the step and reports -1.
        if is_known and not (math.isfinite(norm) and norm >= 0):
            raise NotFinite(f"the gradient is not a number (norm {norm})")
        return norm

    def _local_norm(self) -> float:
        """Return the norm of this process's gradients, because DeepSpeed may report no norm under ZeRO 0.

        Returns NaN under ZeRO 1 to 3 and with several ranks, when one process does not know the norm.
        """
        if self.settings.zero_stage > 0 or self.world.size > 1:
            return math.nan
        gradients = [
            parameter.grad.float().norm()
            for parameter in self.module.parameters()
            if parameter.grad is not None
        ]
        return float(torch.stack(gradients).norm()) if gradients else math.nan

    @contextlib.contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """Return a context in which this process has all parameters complete, also under ZeRO 3.

        Every rank must enter it.
        """
        if self.settings.zero_stage < 3:
            yield
            return
        with self.deepspeed.zero.GatheredParameters(list(self.module.parameters())):
            yield

    def save(self, folder: Path) -> None:
        """Write parameters, optimizer state and random state below the new folder `folder`."""
        self.engine.save_checkpoint(str(folder), tag="state", client_state={"rng": torch.get_rng_state()})

    def load(self, folder: Path) -> None:
        """Load what `save` wrote below `folder`; raise UserError if DeepSpeed finds no state there."""
        path, client = self.engine.load_checkpoint(str(folder), tag="state")
        if path is None:
            raise UserError(f"{folder}: the resumable state is damaged; delete the folder and run again.")
        torch.set_rng_state(client["rng"])
