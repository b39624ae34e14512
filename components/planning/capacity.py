"""Estimates of what a profile needs: memory per GPU, seconds per step, judges, GPU-hours and cost.

A profile is a named set of parameters in params.yaml. Each input of an estimate has an origin: it is
measured, a parameter of the profile, taken from a datasheet, or assumed. The shapes of the model are in
`model_shapes.py` and the formulas of the memory in `memory_model.py`. The time of training is computed from 2
FLOP for each parameter and token in the forward pass and twice that number in the backward pass. The rollouts
are simulated (rollout_simulator.py), because a step ends with its slowest trajectory, whose duration a mean
does not give.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from components.core.errors import UserError
from components.core.params import Params
from components.core.stage_params import Ppo
from components.planning.memory_choices import memory_plan
from components.planning.memory_model import needs_reference
from components.planning.model_shapes import ModelShapes
from components.planning.rollout_simulator import Load, Samplers, draw, enough_judges, simulate
from components.planning.sampler_memory import sampler_memory

# Largest permitted duration of the rollouts, divided by their duration with unlimited judges.
HEADROOM = 1.05
# Steps that are simulated together if the policy is sampled while it is trained.
AHEAD_STEPS = 4


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


def default_inputs(params: Params, gpu: Gpu, shapes: ModelShapes) -> dict[str, Input]:
    """Return all inputs of a plan by name, with their default values for a model of these shapes.

    `cuda-agent plan --assume NAME=VALUE` replaces one of them.
    """
    pool, rollouts = params.pool, params.agentic.rollouts
    return {
        "parameters": Input(shapes.parameters, "", "parameter", shapes.name),
        "active_parameters": Input(shapes.active_parameters, "per token", "parameter", shapes.name),
        "layers": Input(shapes.layers, "", "parameter", shapes.name),
        "hidden": Input(shapes.hidden, "", "parameter", shapes.name),
        "vocabulary": Input(shapes.vocabulary, "", "parameter", shapes.name),
        "kv_bytes_per_token": Input(
            4.0 * shapes.layers * shapes.kv_heads * shapes.head_dim,
            "bytes",
            "parameter",
            f"{shapes.name}, bfloat16",
        ),
        "trainer_gpus": Input(max(1, pool.trainers), "", "parameter", "pool.trainers; 0 is one process"),
        "sampler_gpus": Input(
            max(1, pool.samplers), "", "parameter", "pool.samplers; 0 is the first of the trainers' GPUs"
        ),
        "judges": Input(
            max(1, pool.judges), "", "parameter", "pool.judges; 0 is one on the first of the trainers' GPUs"
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
        "price": Input(pool.price, "per GPU-hour", "parameter", "pool.price"),
    }


def measured_inputs(turns: Sequence[int], tokens: Sequence[int]) -> dict[str, Input]:
    """Return the inputs of a plan that can be measured on the trajectories of a home, by name.

    They are `turns`, `turns_spread`, `tokens_per_turn` and `tokens_spread`. The argument `turns` has the
    number of turns of each trajectory, and `tokens` the number of tokens that the policy sampled in a turn,
    for instance the mean of each trajectory.
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


def training_seconds(
    inputs: dict[str, float],
    params: Params,
    ppo: Ppo,
    *,
    tokens: float,
    context: float,
    query_width: int,
) -> dict[str, float]:
    """Return the seconds of one step's scoring and update, with the keys `score` and `update`.

    Scoring consists of the forward passes of the actor and, if there are any, of reference and critic. The
    update consists of the forward and backward passes of actor and, if there is one, critic in each epoch.
    `inputs` are the values of the plan's inputs. With activation checkpointing, each backward pass repeats
    the forward pass. With adapters, no gradients of the other weights are computed, which is half of the
    backward pass. `tokens` is the number of tokens of the step, `context` the mean number of earlier tokens
    that a token attends to, and `query_width` the width of all attention heads.
    """
    forward = (
        2.0 * inputs["active_parameters"] * tokens + 4.0 * inputs["layers"] * query_width * tokens * context
    )
    rate = inputs["trainer_gpus"] * inputs["gpu_flops"] * inputs["mfu"]
    has_critic = ppo.advantages == "critic"
    recomputed = 1 if params.engine.activation_checkpointing else 0
    passes = (2 if params.policy.adapter.rank else 3) + recomputed
    return {
        "score": (1 + needs_reference(ppo) + has_critic) * forward / rate,
        "update": (1 + has_critic) * passes * ppo.epochs * forward / rate,
    }


def load_of(inputs: dict[str, float], rollouts: Any, context: int) -> Load:
    """Return the distributions from which `draw` draws the trajectories of one step's rollouts.

    `inputs` are the values of the plan's inputs, `rollouts` the parameters of the stage's rollouts, and
    `context` is the size of the context window in tokens.
    """
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
    )


def samplers_of(inputs: dict[str, float], params: Params) -> Samplers:
    """Return the rates of the samplers, and how many trajectories they have in flight.

    The decoding rate is limited by the memory bandwidth. For each token, the weights (of a mixture, all
    experts) are read once for a batch of 128 sequences, and the sequence's key-value cache is read, which is
    taken to fill a quarter of the window. `inputs` are the values of the plan's inputs.
    """
    context = params.policy.context
    read = 2.0 * inputs["parameters"] / 128 + inputs["kv_bytes_per_token"] * context / 4
    rate = inputs["sampler_gpus"] * inputs["gpu_bandwidth"] * inputs["decode_efficiency"] / max(read, 1.0)
    if params.policy.backend == "transformers":
        return Samplers(inputs["sequence_rate"], rate, params.policy.batch)
    held = sampler_memory(params, inputs)
    tokens = max(float(context), held["cache_tokens"])
    return Samplers(inputs["sequence_rate"], rate, max(1, held["contexts"]), tokens)


def plan(params: Params, shapes: ModelShapes, inputs: dict[str, Input], seed: int = 0) -> dict[str, Any]:
    """Return the plan of a profile as a JSON record: memory, seconds by stage, judges, GPU-hours and cost.

    `inputs` has every input of `default_inputs`, and `seed` determines the simulated rollouts. Raises
    UserError if the device of the profile is not `cuda`, or if the ranks cannot share the sequences of the
    model as `engine.sequence_parallel` requires.
    """
    if params.device != "cuda":
        raise UserError(
            "plan: the profile runs on the cpu, where there is nothing to plan; "
            "give one with device=cuda, for instance --profile h20-pool."
        )
    values = {name: item.value for name, item in inputs.items()}
    judges, engine, context = int(values["judges"]), params.engine, params.policy.context
    memory = memory_plan(params, shapes, values)
    stages = {
        name: _stage(ppo, values, judges, params, shapes, seed)
        for name, ppo in (("warmup", params.warmup), ("agentic", params.agentic))
    }
    gpus = values["trainer_gpus"]
    gpus += values["sampler_gpus"] if params.pool.samplers else 0
    gpus += judges if params.pool.judges else 0
    hours = sum(stage["steps"] * stage["seconds"]["step"] for stage in stages.values()) / 3600
    return {
        "gpu": inputs["gpu_memory"].source,
        "model": shapes.name,
        **memory,
        "chosen": f"zero-{engine.zero_stage}",
        "stages": stages,
        "judges": {
            "given": judges,
            "needed": enough_judges(
                draw(load_of(values, params.agentic.rollouts, context), seed),
                samplers_of(values, params),
                HEADROOM,
            ),
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


def _stage(
    ppo: Ppo, values: dict[str, float], judges: int, params: Params, shapes: ModelShapes, seed: int
) -> dict[str, Any]:
    load = load_of(values, ppo.rollouts, params.policy.context)
    samplers = samplers_of(values, params)
    rollout = simulate(draw(load, seed), samplers, judges)
    free = simulate(draw(load, seed), samplers, load.trajectories)
    train = training_seconds(
        values,
        params,
        ppo,
        tokens=rollout.tokens,
        context=rollout.tokens / load.trajectories / 2,
        query_width=shapes.heads * shapes.head_dim,
    )
    step = rollout.seconds + sum(train.values())
    if ppo.staleness:
        found = simulate(
            draw(load, seed, AHEAD_STEPS),
            samplers,
            judges,
            steps=AHEAD_STEPS,
            staleness=ppo.staleness,
            train_seconds=sum(train.values()),
            pauses=params.policy.backend == "transformers" and params.engine.zero_stage < 3,
        )
        step = float(found.trained[-1]) / AHEAD_STEPS
    # The time for judging is the time that an unlimited number of judges would save.
    parts = {"generation": free.seconds, "judging": max(0.0, rollout.seconds - free.seconds), **train}
    return {
        "steps": ppo.steps,
        "seconds": parts | {"rollout": rollout.seconds, "step": step},
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
    name is unknown or a value is not a positive number; a spread may be 0 or negative.
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
