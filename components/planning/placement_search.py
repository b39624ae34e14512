"""Search for the cheapest placement that holds a profile's model, and for the fastest on the GPUs given."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from components.core.params import Params
from components.core.stage_params import Ppo
from components.planning.capacity import Input, load_of, training_seconds
from components.planning.memory_choices import memory_plan
from components.planning.model_shapes import ModelShapes
from components.planning.role_memory import tensor_parallel
from components.planning.rollout_simulator import simulate

# Shares of the rollouts' duration for which judges would be busy if no candidate waited, from which their
# numbers are chosen. At the first a candidate hardly waits.
BUSY_SHARES = (0.5, 0.9)
# Number of doublings of the least numbers of trainers and samplers that are tried.
DOUBLINGS = 6


@dataclass(frozen=True)
class Placement:
    """Numbers of GPUs of the roles, and what the training of a night takes on them."""

    trainers: int
    samplers: int
    judges: int
    hours: float
    gpu_hours: float
    cost: float

    @property
    def gpus(self) -> int:
        return self.trainers + self.samplers + self.judges


@dataclass(frozen=True)
class Rollouts:
    """The rollouts of one step of a stage: trained tokens, seconds, and seconds of judging of all judges."""

    ppo: Ppo
    tokens: float
    seconds: float
    judging: float


def placements(
    params: Params, shapes: ModelShapes, inputs: dict[str, Input], hours: float, seed: int = 0
) -> dict[str, Any]:
    """Return the cheapest placement that holds, and the fastest on the GPUs of the pool, as a JSON record.

    `hours` is the duration of the stages on the pool as it is, which is one of the candidates. Trainers and
    samplers are tried in doublings of the least that hold the model with the settings of the profile, and
    also as many trainers as the pool leaves; for the judges see BUSY_SHARES. A value is None if nothing
    holds. The record is empty if roles share GPUs.
    """
    if not params.pool.samplers or not params.pool.judges:
        return {}
    values = {name: item.value for name, item in inputs.items()}
    given = int(values["trainer_gpus"] + values["sampler_gpus"] + values["judges"])
    found: list[Placement] = []

    def add(trainers: int, samplers: int, judges: int, hours: float) -> None:
        gpu_hours = hours * (trainers + samplers + judges)
        cost = gpu_hours * values["price"]
        found.append(Placement(trainers, samplers, judges, hours, gpu_hours, cost))

    memory = memory_plan(params, shapes, values)
    group = tensor_parallel(params, values)
    if fits(params, memory) and group and group <= values["sampler_gpus"]:
        add(int(values["trainer_gpus"]), int(values["sampler_gpus"]), int(values["judges"]), hours)
    for samplers in [group << doublings for doublings in range(DOUBLINGS)] if group else []:
        sampled = values | {"sampler_gpus": float(samplers)}
        free = [_rollouts(ppo, params, sampled, None, seed) for ppo in (params.warmup, params.agentic)]
        for judges in {
            max(math.ceil(one.judging / (share * one.seconds)) for one in free) for share in BUSY_SHARES
        }:
            rollouts = [_rollouts(one.ppo, params, sampled, judges, seed) for one in free]
            for trainers in _trainer_counts(params, shapes, values, given - samplers - judges):
                trained = sampled | {"trainer_gpus": float(trainers)}
                seconds = sum(_stage_seconds(one, params, shapes, trained) for one in rollouts)
                add(trainers, samplers, judges, seconds / 3600)
    fitting = [placement for placement in found if placement.gpus <= given]
    cheapest = min(found, key=lambda one: one.gpu_hours, default=None)
    fastest = min(fitting, key=lambda one: one.hours, default=None)
    return {
        "given": given,
        "cheapest": None if cheapest is None else asdict(cheapest),
        "fastest": None if fastest is None else asdict(fastest),
    }


def _rollouts(ppo: Ppo, params: Params, values: dict[str, float], judges: int | None, seed: int) -> Rollouts:
    """Return the rollouts of one step, without any wait for a judge if `judges` is None."""
    load = load_of(values, ppo.rollouts, params.policy.context)
    count = judges or load.trajectories
    found = simulate(load, count, seed)
    return Rollouts(ppo, found.tokens, found.seconds, found.busy * count * found.seconds)


def _stage_seconds(
    rollouts: Rollouts, params: Params, shapes: ModelShapes, values: dict[str, float]
) -> float:
    """Return the seconds of all steps of a stage."""
    ppo = rollouts.ppo
    training = training_seconds(
        values,
        params,
        ppo,
        tokens=rollouts.tokens,
        context=rollouts.tokens / (ppo.rollouts.tasks * ppo.rollouts.samples) / 2,
        query_width=shapes.heads * shapes.head_dim,
    )
    return ppo.steps * (rollouts.seconds + sum(training.values()))


def _trainer_counts(params: Params, shapes: ModelShapes, values: dict[str, float], left: int) -> list[int]:
    """Return the numbers of trainers to try: doublings of the least that fits, and `left` if that fits."""
    group = params.engine.sequence_parallel

    def holds(trainers: int) -> bool:
        return fits(params, memory_plan(params, shapes, values | {"trainer_gpus": float(trainers)}))

    least = next((count for doublings in range(10) if holds(count := group << doublings)), None)
    if least is None:
        return []
    rest = left // group * group
    return sorted(
        {least << doublings for doublings in range(DOUBLINGS)}
        | ({rest} if rest > 0 and holds(rest) else set())
    )


def fits(params: Params, memory: dict[str, Any]) -> bool:
    """Return whether the chosen settings fit the GPU in a record of `memory_plan`."""
    return bool(memory["memory_bytes_per_gpu"][f"zero-{params.engine.zero_stage}"]["fits"])
