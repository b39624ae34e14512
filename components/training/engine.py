"""The training engine: DeepSpeed behind a few methods, used in the same way on one core and on many GPUs.

A single process needs no launcher. With several ranks, every rank runs the same stage and computes its part
of each step. Under ZeRO 3 a network is divided among the ranks while it is loaded (`sharded_loading`), so
that no rank ever holds all of it. With sequence parallelism, groups of consecutive ranks share each forward
pass: every rank has a slice of the tokens, and attention exchanges slices for heads (DeepSpeed's Ulysses).
DeepSpeed is imported only when it is first needed, because the import takes seconds.
"""

import contextlib
import functools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore

from components.core import params
from components.core.errors import UserError
from components.training import document_attention
from components.training.batches import Microbatch, Packed

# Betas of AdamW.
BETAS = (0.9, 0.95)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Elements of a tensor that are summed over the ranks at once.
SUMMED_ELEMENTS = 2**24
# Least size of a tensor that engine.activation_offload moves to host memory.
OFFLOADED_BYTES = 2**20

Loss = Callable[[nn.Module, Microbatch], Tensor]


class NotFinite(Exception):
    """Error raised if a loss, a gradient or a metric is NaN or infinite.

    The weights in memory may be NaN then, so they must not be used or saved. The message is a clause, such as
    "policy_loss is not a number".
    """


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


def join_world(device: params.Device, settings: params.Engine) -> World:
    """Join the launcher's process group, or make a group of only this process if there is no launcher.

    engine.collective_seconds limits every collective. DeepSpeed's default of 10 minutes is too short, because
    the other ranks wait in a collective while rank 0 samples. Raises UserError if the number of ranks is not
    a multiple of engine.sequence_parallel.
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


def deepspeed_config(
    settings: params.Engine, *, gradient_clip: float = 0.0, bucket: int = 500_000_000
) -> dict[str, Any]:
    """Return DeepSpeed's configuration; at most `bucket` gradients are reduced at once."""
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
def sharded_loading(settings: params.Engine, device: params.Device) -> Iterator[None]:
    """Return a context in which transformers divides the models that it loads among the ranks, under ZeRO 3.

    Every rank must enter it and load the same models. Rank 0 reads the files, one tensor at a time goes to
    all ranks, and each rank keeps its part.
    """
    if settings.zero_stage < 3:
        yield
        return
    join_world(device, settings)
    _deepspeed(device)
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    config = HfDeepSpeedConfig(deepspeed_config(settings))  # transformers keeps only a weak reference to it
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del config


@functools.cache
def _sequence_groups(heads: int, kv_heads: int, head_dim: int, layers: int, size: int) -> Any:
    """Let the attention of models of this shape exchange slices of the sequence for heads.

    Returns DeepSpeed's description of the groups of ranks. It can be called for one shape in a process.
    """
    from deepspeed import init_distributed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import LlamaConfig

    init_distributed(dist_backend=distributed.get_backend(), auto_mpi_discovery=False)
    shape = LlamaConfig(
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_hidden_layers=layers,
    )
    shape._attn_implementation = document_attention.SDPA
    return UlyssesSPAttentionHF.register_with_transformers(
        SimpleNamespace(config=shape),
        core_attn_implementation=document_attention.SDPA,
        sequence_parallel_size=size,
        micro_batch_size=1,
    )


def sequence_groups(module: nn.Module, settings: params.Engine) -> Any:
    """Prepare the attention of the language model in `module` for sequence parallelism.

    Returns DeepSpeed's description of the groups of ranks, or None without sequence parallelism. Raises
    UserError if the heads cannot be divided, or differ from those of an earlier model of this process.
    """
    size = settings.sequence_parallel
    if size == 1:
        return None
    from transformers import PreTrainedModel

    model = next(part for part in module.modules() if isinstance(part, PreTrainedModel))
    config = model.config.get_text_config()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise UserError(
            f"engine.sequence_parallel: {size} ranks cannot divide {heads} heads and {kv_heads} key-value "
            "heads of the policy; take a divisor of both."
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    try:
        return _sequence_groups(heads, kv_heads, head_dim, config.num_hidden_layers, size)
    except AssertionError as error:
        raise UserError(
            "engine.sequence_parallel: actor and critic differ in their attention heads; "
            "take a critic that was made from this actor, or set it to 1."
        ) from error


class DeepSpeedEngine:
    """Network with its optimizer (torch's AdamW), distributed over the ranks with DeepSpeed's ZeRO 0 to 3."""

    def __init__(
        self, module: nn.Module, engine: params.Engine, *, device: params.Device, gradient_clip: float
    ):
        """Move `module` to the device and prepare it for training in place.

        Every rank must call this with equal weights, or with a module loaded within `sharded_loading`.
        """
        self.world = join_world(device, engine)
        self.settings = engine
        self.deepspeed = _deepspeed(device)
        _move(module, self.world.device)
        if engine.activation_checkpointing:
            from transformers import PreTrainedModel

            for part in module.children():
                if isinstance(part, PreTrainedModel):
                    part.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.module = module
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=BETAS, weight_decay=0.0)
        elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
        config = deepspeed_config(engine, gradient_clip=gradient_clip, bucket=min(elements, 500_000_000))
        self.engine, *_ = self.deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, mpu=sequence_groups(module, engine)
        )

    def forward(self, packed: Packed) -> tuple[Tensor, ...]:
        """Return the network's outputs, computed without gradients."""
        self.engine.eval()
        with torch.no_grad():
            outputs: tuple[Tensor, ...] = self.engine(packed)
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
        # DeepSpeed averages gradients over ranks, but the shares of all ranks must be summed. With sequence
        # parallelism, ZeRO 3 divides by the number of ranks, ZeRO 1 and 2 by the number of groups.
        divisor = self.world.size if self.settings.zero_stage == 3 else self.world.groups
        for microbatch in microbatches:
            with self._offloaded_activations():
                share = loss(self.engine, microbatch)
            self.engine.backward(share * (divisor if microbatch.counted else 0))
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
    def _offloaded_activations(self) -> Iterator[None]:
        """Return a context that keeps large tensors for the backward pass in host memory, if asked for.

        With activation checkpointing these are mostly the inputs of the layers. Parameters stay where they
        are. On cpu nothing is moved.
        """
        if not self.settings.activation_offload or self.world.device.type == "cpu":
            yield
            return

        def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
            if isinstance(tensor, nn.Parameter) or tensor.nbytes < OFFLOADED_BYTES:
                return tensor
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return tensor.device, host.copy_(tensor)

        def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
            return packed if isinstance(packed, Tensor) else packed[1].to(packed[0])

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    @contextlib.contextmanager
    def gathered(self, module: nn.Module, *, recurse: bool = True) -> Iterator[None]:
        """Return a context in which this process has the parameters of `module` complete, also under ZeRO 3.

        Every rank must enter it. With `recurse` False, it is only the parameters that are not of a submodule.
        """
        if self.settings.zero_stage < 3:
            yield
            return
        with self.deepspeed.zero.GatheredParameters(list(module.parameters(recurse))):
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


class FrozenNetwork:
    """Network that is only evaluated: the reference policy, sharded under ZeRO 3 and without an optimizer.

    With engine.reference_offload its parameters are in host memory and come to the device when needed.
    """

    def __init__(self, module: nn.Module, engine: params.Engine, *, device: params.Device):
        self.world = join_world(device, engine)
        self.is_moved = engine.reference_offload and engine.zero_stage < 3
        self.module = module.requires_grad_(False)
        self.network: Any = module
        if engine.zero_stage == 3:
            config = deepspeed_config(engine)
            if engine.reference_offload:
                config["zero_optimization"]["offload_param"] = {"device": "cpu"}
            config["zero_optimization"].pop("offload_optimizer", None)
            _move(module, self.world.device)
            self.network, *_ = _deepspeed(device).initialize(
                model=module, config=config, mpu=sequence_groups(module, engine)
            )
        elif not self.is_moved:
            _move(module, self.world.device)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Return a context in which `forward` may be called."""
        if self.is_moved:
            _move(self.module, self.world.device)
        try:
            yield
        finally:
            if self.is_moved:
                _move(self.module, torch.device("cpu"))

    def forward(self, packed: Packed) -> tuple[Tensor, ...]:
        """Return the network's outputs, computed without gradients."""
        self.network.eval()
        with torch.no_grad():
            outputs: tuple[Tensor, ...] = self.network(packed)
        return outputs


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a network to the device, without the parameters that ZeRO 3 has placed already."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not hasattr(tensor, "ds_id"):
            tensor.data = tensor.data.to(device)
