"""The training engine: DeepSpeed with the same functions on one core and on many GPUs.

`train_step` and `evaluate` divide the rows of a batch into micro-batches, and these among the ranks.

With sequence parallelism (DeepSpeed's Ulysses), groups of consecutive ranks share each forward pass: every
rank has a slice of the tokens, but in attention it has all tokens for some of the heads.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import save_on_cpu
from transformers.modeling_layers import GradientCheckpointingLayer

from components.core import records, stage_params
from components.core.errors import UserError
from components.training import document_attention
from components.training.batches import Batch, Microbatch, Packed, Streams, pack, plan, stream
from components.training.deepspeed_config import deepspeed_config, discarded_prints, import_deepspeed
from components.training.output_head import TokenScores
from components.training.ranks import World, join_world

# Betas of AdamW.
BETAS = (0.9, 0.95)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Least size in bytes of a tensor that engine.activation_offload moves to host memory.
OFFLOADED_BYTES = 2**20

# Folder of the shards of a state, which all ranks write.
SHARDS = "state"

Values = TypeVar("Values", bound=Streams)
# Function that takes a network, packed tokens and the values of their own tokens (those that the policy
# sampled), and returns loss and metrics, each summed over these own tokens.
Loss = Callable[[nn.Module, Packed, Values], tuple[Tensor, dict[str, Tensor]]]


class NotFinite(Exception):
    """Error raised if a loss, a gradient or a metric is NaN or infinite.

    The weights in memory must not be used or saved then. The message is such as "policy_loss is not a
    number".
    """


@functools.cache
def _sequence_groups(heads: int, kv_heads: int, head_dim: int, layers: int, size: int) -> Any:
    """Register attention that divides sequences among groups of `size` ranks, for models of this shape.

    The shape consists of the numbers of query heads, key-value heads and layers, and of the size of a head. A
    process can register only one shape; DeepSpeed raises AssertionError if a second one differs. Returns
    DeepSpeed's description of the groups of ranks.
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


def sequence_groups(module: nn.Module, settings: stage_params.Engine) -> Any:
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
        self,
        module: nn.Module,
        engine: stage_params.Engine,
        *,
        device: records.Device,
        gradient_clip: float,
    ):
        """Move `module` to the device and prepare it for training in place.

        `engine` has the parameters of the section engine. The gradient of a step is scaled down to the norm
        `gradient_clip` if its norm is larger. Every rank must call this with equal weights, or with a module
        loaded within `sharded_loading`. Raises UserError if engine.sequence_parallel does not fit the ranks
        or the model's heads.
        """
        self.world, self.settings = join_world(device, engine), engine
        self.deepspeed = import_deepspeed(device)
        _move(module, self.world.device)
        if engine.activation_checkpointing:
            from transformers import PreTrainedModel

            for part in module.children():
                if isinstance(part, PreTrainedModel):
                    part.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if engine.compile:
            compile_network(module)
        self.module = module
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=BETAS, weight_decay=0.0)
        elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
        config = deepspeed_config(engine, gradient_clip=gradient_clip, bucket=min(elements, 500_000_000))
        with discarded_prints():
            self.engine, *_ = self.deepspeed.initialize(
                model=module, optimizer=optimizer, config=config, mpu=sequence_groups(module, engine)
            )

    def step(
        self,
        microbatches: Sequence[Microbatch],
        loss: Callable[[nn.Module, Microbatch], Tensor],
        *,
        learning_rate: float,
    ) -> float:
        """Take one optimizer step and return the gradient norm before clipping.

        `microbatches` are those that this rank computes. `loss` must return a micro-batch's share of the
        step's loss: the sum over those tokens of the micro-batch that the policy sampled, divided by the
        number of such tokens in the whole step on all ranks. This method does not divide it again. The norm
        is NaN under ZeRO 0 with several ranks if DeepSpeed does not report it. Raises NotFinite if the norm
        is known and not finite.
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

    def _offloaded_activations(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that keeps large tensors for the backward pass in host memory.

        These are tensors of at least OFFLOADED_BYTES (1 MiB), with activation checkpointing mostly the inputs
        of the layers. Parameters stay on the device. Nothing is moved on cpu or without
        engine.activation_offload.
        """
        if not self.settings.activation_offload or self.world.device.type == "cpu":
            return contextlib.nullcontext()
        hooks = save_on_cpu(pin_memory=True)
        move = hooks.pack_hook

        def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
            is_kept = isinstance(tensor, nn.Parameter) or tensor.nbytes < OFFLOADED_BYTES
            return (tensor.device, tensor) if is_kept else move(tensor)

        hooks.pack_hook = pack
        return hooks

    def _local_norm(self) -> float:
        """Return the L2 norm of all gradients under ZeRO 0 with a single rank, and otherwise NaN.

        It is needed because DeepSpeed may report no norm under ZeRO 0 with a single rank. It is also NaN if
        no parameter has a gradient.
        """
        if self.settings.zero_stage > 0 or self.world.size > 1:
            return math.nan
        gradients = [
            parameter.grad.float().norm()
            for parameter in self.module.parameters()
            if parameter.grad is not None
        ]
        return float(torch.stack(gradients).norm()) if gradients else math.nan

    def gathered(self, module: nn.Module, *, recurse: bool = True) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this process has the parameters of `module` complete, also under ZeRO 3.

        Every rank must enter it. If `recurse` is False, the parameters of submodules are left out.
        """
        context: contextlib.AbstractContextManager[None] = self.deepspeed.zero.GatheredParameters(
            list(module.parameters(recurse)), enabled=self.settings.zero_stage == 3
        )
        return context

    def save(self, folder: Path) -> None:
        """Write parameters, optimizer state and random state below `folder`; every rank must call this."""
        self.engine.save_checkpoint(str(folder), tag=SHARDS, client_state={"rng": torch.get_rng_state()})

    def load(self, folder: Path) -> None:
        """Load what `save` wrote below `folder` with the same number of ranks; every rank must call this.

        Parameters, optimizer state and random state are replaced. Raises UserError if DeepSpeed finds no
        state in `folder`.
        """
        with discarded_prints():
            path, client = self.engine.load_checkpoint(str(folder), tag=SHARDS)
        if path is None:
            raise UserError(f"{folder}: the resumable state is damaged; delete the folder and run again.")
        torch.set_rng_state(client["rng"])


class FrozenNetwork:
    """Network that is only evaluated and has no optimizer: the reference policy, with which a stage started.

    Under ZeRO 3 its parameters are divided among the ranks. With engine.reference_offload they are in host
    memory. Within the context `on_device` they are all on the device, except under ZeRO 3, where DeepSpeed
    moves those of each layer when the layer is computed.
    """

    def __init__(self, module: nn.Module, engine: stage_params.Engine, *, device: records.Device):
        self.world, self.settings = join_world(device, engine), engine
        self.is_moved = engine.reference_offload and engine.zero_stage < 3
        self.module = module.requires_grad_(False)
        self.engine: Any = module
        if engine.compile:
            compile_network(module)
        if engine.zero_stage == 3:
            config = deepspeed_config(engine)
            if engine.reference_offload:
                config["zero_optimization"]["offload_param"] = {"device": "cpu"}
            config["zero_optimization"].pop("offload_optimizer", None)
            _move(module, self.world.device)
            with discarded_prints():
                self.engine, *_ = import_deepspeed(device).initialize(
                    model=module, config=config, mpu=sequence_groups(module, engine)
                )
        elif not self.is_moved:
            _move(module, self.world.device)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Return a context in which the network's parameters are on the device.

        `evaluate` may be called with the network only in this context. Under ZeRO 3, DeepSpeed itself moves
        the parameters of each layer when the layer is computed.
        """
        if self.is_moved:
            _move(self.module, self.world.device)
        try:
            yield
        finally:
            if self.is_moved:
                _move(self.module, torch.device("cpu"))


def compile_network(module: nn.Module) -> None:
    """Compile the layers of a network and the scoring of tokens by its output head with torch.compile.

    The network is changed in place. The compiled layers are used for packed rows only, that is, if a layer
    gets the argument `documents`. When transformers samples the network, its layers are not compiled.
    """
    for part in module.modules():
        if isinstance(part, TokenScores):
            part.is_compiled = True
        elif isinstance(part, GradientCheckpointingLayer):
            compiled = torch.compile(part.forward, dynamic=True)
            part.forward = functools.partial(_forward, part.forward, compiled)


def _forward(forward: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `compiled` for packed rows, and `forward` otherwise, and return the result.

    The rows are packed if `documents`, their bounds in the sequence, is among the keyword arguments.
    """
    return (compiled if "documents" in kwargs else forward)(*args, **kwargs)


def _move(module: nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers of a network to the device.

    Parameters that ZeRO 3 manages, and has therefore placed already, are left where they are.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if not hasattr(tensor, "ds_id"):
            tensor.data = tensor.data.to(device)


class MetricSums:
    """Sums of metrics over the tokens that the policy sampled.

    `add` adds the sums of one micro-batch of this rank, and `means` combines the sums of all ranks.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def add(self, parts: dict[str, Tensor]) -> None:
        for name, value in parts.items():
            part = value.detach().float()
            # The sums stay on the device, because reading them would wait for the micro-batch.
            self.values[name] = self.values[name] + part if name in self.values else part

    def means(self, world: World, tokens: int) -> dict[str, float]:
        """Return each metric's sum over all ranks, divided by `tokens`.

        `tokens` is the number of tokens, on all ranks, over which each metric was summed. Raises NotFinite if
        a sum is NaN or infinite. Every rank must call this, after adding metrics of the same names.
        """
        total = world.sum(torch.stack(list(self.values.values())).cpu())
        for name, value in zip(self.values, total, strict=True):
            if not torch.isfinite(value):
                raise NotFinite(f"{name} is not a number")
        return {name: float(value) / tokens for name, value in zip(self.values, total, strict=True)}


def train_step(
    engine: DeepSpeedEngine,
    batch: Batch,
    values: Values,
    index: Sequence[int],
    loss: Loss[Values],
    sums: MetricSums,
    *,
    learning_rate: float,
) -> float:
    """Take one optimizer step on the rows of `batch` with the indices `index`; return the gradient norm.

    The norm is that before clipping; NotFinite is raised if it is known and not finite. Every rank calls this
    with the same arguments. `values` has what `loss` needs for each own token of `batch`, those that the
    policy sampled. `loss` takes the network, a packed micro-batch and its part of `values`, and returns the
    loss and metrics, each summed over own tokens. The loss is divided by the number of own tokens in all of
    these rows. The metrics are added to `sums`.
    """
    world, tokens = engine.world, batch.own_tokens(index)

    def share(network: nn.Module, microbatch: Microbatch) -> Tensor:
        packed = pack(batch, microbatch.rows, world.part, world.sequence_parallel, world.device)
        total, parts = loss(network, packed, values.at(packed.own, world.device))
        sums.add(parts if microbatch.counted else {name: part.new_zeros(()) for name, part in parts.items()})
        return total / tokens

    microbatches = plan(
        batch.lengths, index, engine.settings.tokens_per_microbatch, world.group, world.groups
    )
    return engine.step(microbatches, share, learning_rate=learning_rate)


def evaluate(engine: DeepSpeedEngine | FrozenNetwork, batch: Batch) -> tuple[Tensor, ...]:
    """Return the outputs of the network of `engine` on the whole batch, each float32 [own tokens], on cpu.

    Own tokens are those that the policy sampled. An actor has the outputs log-probability and entropy (nats),
    a critic the value; they have no gradients. Every rank must call this, computes some micro-batches and
    gets the complete outputs.
    """
    results: list[Tensor] = []
    world, limit = engine.world, engine.settings.tokens_per_microbatch
    engine.engine.eval()
    for microbatch in plan(batch.lengths, range(len(batch.ids)), limit, world.group, world.groups):
        packed = pack(batch, microbatch.rows, world.part, world.sequence_parallel, world.device)
        with torch.no_grad():
            outputs = engine.engine(packed)
        results = results or [stream(batch.tokens) for _ in outputs]
        if microbatch.counted:
            for result, output in zip(results, outputs, strict=True):
                result[packed.own] = output.float().cpu()
    return tuple(world.sum(result) for result in results)
