"""Memory of a rank of the trainer with the settings of a profile, and with other settings that need less."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from components.core.errors import UserError
from components.core.params import Params
from components.core.stage_params import Engine
from components.planning.memory_model import (
    RESERVE,
    RankMemory,
    SharedMemory,
    can_share_sequence,
    rank_memory,
    roles_of,
    shared_memory,
)
from components.planning.model_shapes import ModelShapes

# Values of `engine.sequence_parallel`, and sets of parameters of the engine that keep something in host
# memory, which a plan compares. The sets are ordered by what they cost. `reference_offload` copies 2P/N bytes
# in each forward pass of the reference, for P parameters and N ranks. `activation_offload` copies the inputs
# of all layers in each forward and backward pass. With `cpu_offload` the optimizer computes in the host.
SEQUENCE_PARALLEL = (1, 2, 4, 8)
OFFLOADS = (
    (),
    ("reference_offload",),
    ("activation_offload",),
    ("activation_offload", "reference_offload"),
    ("cpu_offload",),
    ("cpu_offload", "activation_offload"),
    ("cpu_offload", "activation_offload", "reference_offload"),
)


def memory_plan(params: Params, shapes: ModelShapes, values: dict[str, float]) -> dict[str, Any]:
    """Return the memory of the first rank as a JSON record, in bytes.

    `memory_bytes_per_gpu` has the parts for each ZeRO stage, `alternatives` the totals for each choice of
    sequence parallelism and offloads under the profile's ZeRO stage, and `smallest` the first alternative
    that fits the GPU, in the order of OFFLOADS, or None. `values` has the values of the inputs of the plan,
    which replace the sizes in `shapes`. Raises UserError if the ranks cannot share sequences as
    `engine.sequence_parallel` requires.
    """
    engine, ranks = params.engine, values["trainer_gpus"]
    shapes = replace(
        shapes,
        parameters=values["parameters"],
        active_parameters=values["active_parameters"],
        layers=int(values["layers"]),
        hidden=int(values["hidden"]),
        vocabulary=int(values["vocabulary"]),
    )
    if ranks % engine.sequence_parallel:
        raise UserError(
            f"engine.sequence_parallel: {engine.sequence_parallel} does not divide {ranks:g} ranks; "
            "set pool.trainers to a multiple of it."
        )
    if not can_share_sequence(shapes, engine.sequence_parallel):
        raise UserError(
            f"engine.sequence_parallel: {engine.sequence_parallel} ranks cannot share the sequences of "
            f"{shapes.name} ({shapes.heads} heads, {shapes.kv_heads} key-value heads"
            f"{', eager attention' if shapes.is_eager else ''}); take a divisor of both, or 1."
        )
    gpu_memory = values["gpu_memory"]
    shared, roles = shared_memory(params, shapes, gpu_memory), roles_of(params, shapes)
    # A trajectory that is longer than tokens_per_microbatch has a micro-batch of its own.
    row = params.policy.context
    tokens = max(engine.tokens_per_microbatch, row)

    def memory(settings: Engine) -> RankMemory:
        return rank_memory(shapes, settings, roles, ranks=ranks, tokens=tokens, row=row)

    alternatives = [
        {
            "sequence_parallel": parallel,
            "offloads": list(offloads),
            **_totals(memory(_choice(engine, parallel, offloads)), shared, gpu_memory),
        }
        for offloads in OFFLOADS
        for parallel in SEQUENCE_PARALLEL
        if ranks % parallel == 0
        and can_share_sequence(shapes, parallel)
        and (roles.has_reference or "reference_offload" not in offloads)
        and (engine.activation_checkpointing or "activation_offload" not in offloads)
    ]
    return {
        "memory_bytes_per_gpu": {
            f"zero-{stage}": _parts(
                memory(engine.model_copy(update={"zero_stage": stage})), shared, gpu_memory
            )
            for stage in range(4)
        },
        "roles": asdict(roles),
        "tokens": tokens,
        "alternatives": alternatives,
        "smallest": next((choice for choice in alternatives if choice["fits"]), None),
    }


def options_of(choice: dict[str, Any], engine: Engine) -> str:
    """Return the command-line options that change the settings `engine` to `choice`.

    `choice` is one of the alternatives in the record of `memory_plan`. The options have the form `--set
    engine.NAME=VALUE` and are separated by spaces.
    """
    wanted = {"sequence_parallel": choice["sequence_parallel"]}
    wanted |= {name: name in choice["offloads"] for name in OFFLOADS[-1]}
    return " ".join(
        f"--set engine.{name}={json.dumps(value)}"
        for name, value in wanted.items()
        if value != getattr(engine, name)
    )


def _choice(engine: Engine, parallel: int, offloads: Sequence[str]) -> Engine:
    """Return a copy of `engine` in which groups of `parallel` ranks share each sequence.

    Of the offloads in OFFLOADS, exactly those named in `offloads` are switched on.
    """
    update = {"sequence_parallel": parallel, **{name: name in offloads for name in OFFLOADS[-1]}}
    return engine.model_copy(update=update)


def _totals(memory: RankMemory, shared: SharedMemory, gpu_memory: float) -> dict[str, Any]:
    training = memory.total + shared.while_training
    sampling = memory.resident + shared.while_sampling
    reserved = RESERVE * gpu_memory
    return {
        "training": training,
        "sampling": sampling,
        "total": max(training, sampling),
        "host_total": memory.host + shared.host,
        "reserved": reserved,
        "fits": max(training, sampling) <= gpu_memory - reserved,
    }


def _parts(memory: RankMemory, shared: SharedMemory, gpu_memory: float) -> dict[str, Any]:
    return {
        "states": memory.states,
        "reference": memory.reference,
        "gathered": memory.gathered,
        "gradients": memory.gradients,
        "activations": memory.activations,
        "logits": memory.logits,
        "step": memory.step,
        "context": memory.context,
        "shared": {"training": shared.while_training, "sampling": shared.while_sampling},
        "host": {
            "states": memory.host_optimizer,
            "reference": memory.host_reference,
            "activations": memory.host_activations,
            "sampler": shared.host,
        },
        **_totals(memory, shared, gpu_memory),
    }
