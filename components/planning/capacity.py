"""Estimates of what a profile needs: memory per GPU, seconds per step, judges, GPU-hours and cost.

Each input has an origin: it is measured, a parameter of the profile, taken from a datasheet, or assumed. The
formulas are ZeRO's memory (Rajbhandari et al. 2020, section 5: 16 bytes for each parameter under mixed
precision), activations under checkpointing (Korthikanti et al. 2022, table 2), and 2 FLOP for each parameter
and token in the forward pass and twice that number in the backward pass. The rollouts are simulated
(rollout_simulator.py), because a step ends with its slowest trajectory, whose duration a mean does not give.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from components.core.errors import UserError
from components.core.params import Params, Ppo
from components.planning.rollout_simulator import Load, Rollout, enough_judges, simulate

# Bytes per GPU that are reserved for the CUDA context, NCCL's buffers and fragmentation.
RESERVED = 6 * 2**30
# Largest permitted duration of the rollouts, divided by their duration with unlimited judges.
HEADROOM = 1.05


@dataclass(frozen=True)
class Gpu:
    """Datasheet values of a GPU: memory in bytes, dense bfloat16 FLOP/s, memory bandwidth in bytes/s."""

    name: str
    memory: float
    flops: float
    bandwidth: float


GPUS = {
    "h20": Gpu("NVIDIA H20", 96e9, 148e12, 4.0e12),
    "h100": Gpu("NVIDIA H100 SXM", 80e9, 989e12, 3.35e12),
    "h200": Gpu("NVIDIA H200", 141e9, 989e12, 4.8e12),
}


@dataclass(frozen=True)
class Input:
    """One input of the plan, with its origin and a text on the source of the value."""

    value: float
    unit: str
    origin: Literal["parameter", "measured", "datasheet", "assumed"]
    source: str


def default_inputs(params: Params, gpu: Gpu) -> dict[str, Input]:
    """Return all inputs of a plan with their default values.

    `cuda-agent plan --assume NAME=VALUE` replaces one of them.
    """
    policy = params.policy
    parameters = (
        policy.layers
        * (
            policy.hidden * policy.head_dim * (2 * policy.heads + 2 * policy.kv_heads)
            + 3 * policy.hidden * policy.feed_forward
        )
        + policy.vocabulary * policy.hidden
    )
    rollouts = params.agentic.rollouts
    return {
        "parameters": Input(parameters, "", "parameter", "policy.*"),
        "active_parameters": Input(parameters, "", "parameter", "policy.* (all: not a mixture of experts)"),
        "layers": Input(policy.layers, "", "parameter", "policy.layers"),
        "hidden": Input(policy.hidden, "", "parameter", "policy.hidden"),
        "vocabulary": Input(policy.vocabulary, "", "parameter", "policy.vocabulary"),
        "kv_bytes_per_token": Input(
            4.0 * policy.layers * policy.kv_heads * policy.head_dim,
            "bytes",
            "parameter",
            "policy.*, bfloat16",
        ),
        "trainer_gpus": Input(64, "", "assumed", "the paper does not say"),
        "judges": Input(
            params.sandbox.judges, "", "parameter", "sandbox.judges; the paper's pool is 128 H20"
        ),
        "turns": Input(
            min(rollouts.max_turns, 40), "per trajectory, median", "assumed", f"limit {rollouts.max_turns}"
        ),
        "turns_spread": Input(
            0.6, "sigma of the log", "assumed", "a few trajectories use every turn they have"
        ),
        "tokens_per_turn": Input(
            min(rollouts.max_new_tokens, 700), "median", "assumed", f"limit {rollouts.max_new_tokens}"
        ),
        "tokens_spread": Input(
            0.7, "sigma of the log", "assumed", "reasoning before a tool call varies by a factor of two"
        ),
        "observation_tokens": Input(500, "per turn", "assumed", "compiler and verifier output, truncated"),
        "judged_share": Input(
            0.35, "of turns", "assumed", "turns that verify or profile; the others read, write and compile"
        ),
        "judge_seconds": Input(
            2.6, "seconds", "measured", "docs/judge.md: one H200, a whole verdict with the compile baseline"
        ),
        "judge_spread": Input(0.5, "sigma of the log", "assumed", "builds and slow tasks"),
        "tool_seconds": Input(1.5, "seconds", "assumed", "a turn that needs no judge"),
        "sequence_rate": Input(40, "tokens/s of one sequence", "assumed", "decoding at full batch"),
        "decode_efficiency": Input(0.5, "of the memory bandwidth", "assumed", "vLLM at large batch"),
        "mfu": Input(0.35, "of the datasheet's FLOP/s", "assumed", "long packed sequences under ZeRO-3"),
        "gpu_memory": Input(gpu.memory, "bytes", "datasheet", gpu.name),
        "gpu_flops": Input(gpu.flops, "FLOP/s", "datasheet", gpu.name),
        "gpu_bandwidth": Input(gpu.bandwidth, "bytes/s", "datasheet", gpu.name),
        "price": Input(2.0, "per GPU-hour", "assumed", "give your own"),
    }


def measured_inputs(turns: Sequence[int], tokens: Sequence[int]) -> dict[str, Input]:
    """Return the inputs `turns`, `turns_spread`, `tokens_per_turn` and `tokens_spread` as they were measured.

    They are computed from the trajectories of a home. `turns` has the number of turns of each trajectory, and
    `tokens` the number of tokens that the policy sampled in a turn, for instance the mean of each trajectory.
    """
    source = f"{len(turns)} trajectories of this home"
    found = {}
    for name, sizes, unit in (
        ("turns", turns, "per trajectory, median"),
        ("tokens_per_turn", tokens, "median"),
    ):
        logs = np.log(np.maximum(sizes, 1))
        found[name] = Input(float(np.exp(np.median(logs))), unit, "measured", source)
        found["turns_spread" if name == "turns" else "tokens_spread"] = Input(
            float(logs.std()), "sigma of the log", "measured", source
        )
    return found


def zero_memory(
    parameters: float,
    gpus: float,
    stage: int,
    *,
    trained: int = 2,
    frozen: int = 1,
    offload: bool = False,
    gradient_bytes: float = 4.0,
) -> float:
    """Return the bytes per GPU of weights, gradients and Adam's state under a ZeRO stage.

    `trained` is the number of trained networks (actor and critic). `frozen` is the number of networks that
    are not trained (the reference), of which only the weights are included. With `offload`, Adam's state is
    not included, because it lies in the memory of the host. `gradient_bytes` is the size of one gradient,
    which the trainer accumulates in float32.
    """
    weights = 2.0 * parameters / (gpus if stage >= 3 else 1)
    gradients = gradient_bytes * parameters / (gpus if stage >= 2 else 1)
    state = 12.0 * parameters / (gpus if stage >= 1 else 1)
    return trained * (weights + gradients + (0.0 if offload else state)) + frozen * weights


def activation_memory(inputs: dict[str, float], tokens: float, *, checkpointing: bool) -> float:
    """Return the bytes per GPU of the activations of one micro-batch in one network.

    They consist of the activations that are kept for every layer until the backward pass, all activations of
    the layer that is being computed, and the logits. With `checkpointing`, only the input of each layer is
    kept, and otherwise all its activations. `tokens` is the number of tokens of the micro-batch.
    """
    full_layer = 34.0 * tokens * inputs["hidden"]
    kept = (
        2.0 * tokens * inputs["hidden"] * inputs["layers"] if checkpointing else full_layer * inputs["layers"]
    )
    # At most four float32 tensors of logits are alive, each of at most LOGITS_BYTES (token_scores.py).
    return kept + full_layer + 4.0 * min(4.0 * tokens * inputs["vocabulary"], 2.0**28)


def training_seconds(
    inputs: dict[str, float], tokens: float, context: float, *, checkpointing: bool, epochs: int
) -> dict[str, float]:
    """Return the seconds of one step's scoring and update, with the keys `score` and `update`.

    Scoring consists of the forward passes of actor, reference and critic. The update consists of the forward
    and backward passes of actor and critic, `epochs` times. With `checkpointing`, each backward pass repeats
    the forward pass. `tokens` is the number of tokens of the step, and `context` the mean number of earlier
    tokens that a token attends to.
    """
    forward = (
        2.0 * inputs["active_parameters"] * tokens
        + 2.0 * inputs["layers"] * inputs["hidden"] * tokens * context
    )
    rate = inputs["trainer_gpus"] * inputs["gpu_flops"] * inputs["mfu"]
    return {"score": 3 * forward / rate, "update": 2 * (4 if checkpointing else 3) * epochs * forward / rate}


def load_of(inputs: dict[str, float], rollouts: Any, context: int) -> Load:
    """Return the description of one step's rollouts that `simulate` needs.

    `rollouts` are the parameters of the stage's rollouts, and `context` is the size of the context window.
    The decoding rate is limited by the memory bandwidth. For each token, the weights are read once for a
    batch of 128 sequences, and the key-value cache once for each sequence, which fills a quarter of the
    window.
    """
    read = 2.0 * inputs["active_parameters"] / 128 + inputs["kv_bytes_per_token"] * context / 4
    single_turn = rollouts.max_turns == 1
    return Load(
        trajectories=rollouts.tasks * rollouts.samples,
        turns=1.0 if single_turn else inputs["turns"],
        turns_spread=0.0 if single_turn else inputs["turns_spread"],
        max_turns=rollouts.max_turns,
        # In an episode with a single turn, this turn contains the whole reasoning, so it is assumed to be
        # longer.
        tokens=inputs["tokens_per_turn"] * (8 if single_turn else 1),
        tokens_spread=inputs["tokens_spread"],
        max_tokens=rollouts.max_new_tokens,
        context=context,
        observation_tokens=inputs["observation_tokens"],
        judged_share=1.0 if single_turn else inputs["judged_share"],
        judge_seconds=inputs["judge_seconds"],
        judge_spread=inputs["judge_spread"],
        tool_seconds=inputs["tool_seconds"],
        sequence_rate=inputs["sequence_rate"],
        total_rate=inputs["trainer_gpus"]
        * inputs["gpu_bandwidth"]
        * inputs["decode_efficiency"]
        / max(read, 1.0),
    )


def plan(params: Params, inputs: dict[str, Input], seed: int = 0) -> dict[str, Any]:
    """Return the whole plan as a JSON record.

    `inputs` has every input of `default_inputs`, and `seed` determines the simulated rollouts.
    Raises UserError if the device of the profile is not `cuda`.
    """
    if params.device != "cuda":
        raise UserError(
            "plan: the profile runs on the cpu, where there is nothing to plan; "
            "give one with device=cuda, for instance --profile h20-pool."
        )
    values = {name: item.value for name, item in inputs.items()}
    judges, engine, context = int(values["judges"]), params.engine, params.policy.context
    stages = {
        name: _stage(ppo, values, judges, params, seed)
        for name, ppo in (("warmup", params.warmup), ("agentic", params.agentic))
    }
    gpus = values["trainer_gpus"] + judges
    hours = sum(stage["steps"] * stage["seconds"]["step"] for stage in stages.values()) / 3600
    activations = activation_memory(
        values, engine.tokens_per_microbatch, checkpointing=engine.activation_checkpointing
    )
    memory = {}
    for zero in range(4):
        states = zero_memory(values["parameters"], values["trainer_gpus"], zero, offload=engine.cpu_offload)
        used = states + activations + RESERVED
        memory[f"zero-{zero}"] = {
            "states": states,
            "activations": activations,
            "reserved": RESERVED,
            "total": used,
            "fits": used <= values["gpu_memory"],
        }
    return {
        "gpu": inputs["gpu_memory"].source,
        "memory_bytes_per_gpu": memory,
        "chosen": f"zero-{engine.zero_stage}",
        "stages": stages,
        "judges": {
            "given": judges,
            "needed": enough_judges(load_of(values, params.agentic.rollouts, context), HEADROOM, seed),
            "headroom": HEADROOM,
        },
        "gpus": gpus,
        "gpu_hours": hours * gpus,
        "hours": hours,
        "cost": hours * gpus * values["price"],
        "inputs": {name: asdict(item) for name, item in inputs.items()},
        "left_out": "cold start, rejection fine-tuning, value pretraining, evaluation; "
        "weight transfer to the samplers; failures",
    }


def _stage(ppo: Ppo, values: dict[str, float], judges: int, params: Params, seed: int) -> dict[str, Any]:
    load = load_of(values, ppo.rollouts, params.policy.context)
    rollout: Rollout = simulate(load, judges, seed)
    free = simulate(load, load.trajectories, seed)
    train = training_seconds(
        values,
        rollout.tokens,
        rollout.tokens / load.trajectories / 2,
        checkpointing=params.engine.activation_checkpointing,
        epochs=ppo.epochs,
    )
    # The time for judging is the time that an unlimited number of judges would save.
    parts = {"generation": free.seconds, "judging": max(0.0, rollout.seconds - free.seconds), **train}
    return {
        "steps": ppo.steps,
        "seconds": parts | {"rollout": rollout.seconds, "step": rollout.seconds + sum(train.values())},
        "bottleneck": max(parts, key=lambda part: parts[part]),
        "tokens_per_step": rollout.tokens,
        "judgements_per_step": rollout.judgements,
        "tail": {
            "half_done": rollout.quantile(0.5),
            "p90": rollout.quantile(0.9),
            "p99": rollout.quantile(0.99),
            "last": rollout.seconds,
        },
        "queue": {
            "wait_mean": rollout.wait_mean,
            "wait_p95": rollout.wait_p95,
            "longest": rollout.longest_queue,
            "busy": rollout.busy,
        },
    }


def assume(inputs: dict[str, Input], choices: list[str]) -> dict[str, Input]:
    """Return a copy of the inputs in which each choice NAME=VALUE has set the input NAME to VALUE.

    If `parameters` is chosen and `active_parameters` is not, both get the same value. Raises UserError if a
    name is unknown or a value is not a positive number. The sign of a spread is not checked.
    """
    changed = dict(inputs)
    for choice in choices:
        name, equals, text = choice.partition("=")
        if not equals:
            raise UserError(f"--assume {choice}: NAME=VALUE is expected, for instance mfu=0.4.")
        if name not in inputs:
            raise UserError(f"--assume {choice}: no such input; give one of {', '.join(inputs)}.")
        try:
            value = float(text)
        except ValueError as error:
            raise UserError(f"--assume {choice}: a number is expected, for instance {name}=1e9.") from error
        if value <= 0 and not name.endswith("_spread"):
            raise UserError(f"--assume {choice}: a number above 0 is expected.")
        changed[name] = replace(inputs[name], value=value, origin="assumed", source=f"--assume {choice}")
    if "parameters" in {choice.partition("=")[0] for choice in choices} and "active_parameters" not in {
        choice.partition("=")[0] for choice in choices
    }:
        changed["active_parameters"] = replace(
            changed["parameters"], source="as many as there are: not a mixture of experts"
        )
    return changed
