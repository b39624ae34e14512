"""Search for the cheapest and the fastest division of GPUs among trainers, samplers and judges.

A placement is such a division. It must hold the model of the profile in the memory of its GPUs.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from components.core.params import Params
from components.core.stage_params import Ppo
from components.planning.capacity import Input, load_of, samplers_of, training_seconds
from components.planning.memory_choices import memory_plan
from components.planning.model_shapes import ModelShapes
from components.planning.rollout_simulator import draw, simulate
from components.planning.sampler_memory import tensor_parallel

# Numbers of judges are tried at which a judge would be busy for these shares of the rollouts' duration if no
# candidate waited for one. At the first share a candidate hardly waits.
BUSY_SHARES = (0.5, 0.9)
# How many numbers of trainers, and of samplers, are tried: the least one that holds the model, twice as many,
# four times as many, and so on.
DOUBLINGS = 6


@dataclass(frozen=True)
class Placement:
    """Numbers of GPUs for trainers, samplers and judges, with the time and cost of both PPO stages on them.

    `hours` is the duration, and `cost` is in the currency of `pool.price`.
    """

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
    """Simulated rollouts of one step of the stage with the parameters `ppo`.

    `tokens` is the number of tokens of all trajectories, `seconds` the duration of the rollouts, and
    `judging` the sum over the judges of the seconds in which they judge.
    """

    ppo: Ppo
    tokens: float
    seconds: float
    judging: float


def placements(
    params: Params, shapes: ModelShapes, inputs: dict[str, Input], hours: float, seed: int = 0
) -> dict[str, Any]:
    """Return the cheapest placement and the fastest on as many GPUs as the pool has, as a JSON record.

    Only placements whose GPUs have enough memory are compared. The pool as it is, on which the stages take
    `hours`, is one of the placements. For the others, the smallest numbers of trainers and samplers that hold
    the model with the settings of the profile are doubled repeatedly. All GPUs of the pool that samplers and
    judges leave are also tried as trainers. The numbers of judges follow from BUSY_SHARES. `cheapest` or
    `fastest` is None if no placement has enough memory. The record is empty if the roles of the profile share
    GPUs.
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
    """Simulate the rollouts of one step of a stage with `judges` judges.

    If `judges` is None, there is a judge for each trajectory, so that no candidate waits for one.
    """
    load = load_of(values, ppo.rollouts, params.policy.context)
    count = judges or load.trajectories
    found = simulate(draw(load, seed), samplers_of(values, params), count)
    return Rollouts(ppo, found.tokens, found.seconds, found.busy * count * found.seconds)


def _stage_seconds(
    rollouts: Rollouts, params: Params, shapes: ModelShapes, values: dict[str, float]
) -> float:
    """Return the seconds of all steps of a stage, rollouts and training together.

    `values` are the values of the plan's inputs.
    """
    ppo = rollouts.ppo
    training = training_seconds(
        values,
        params,
        ppo,
        tokens=rollouts.tokens,
        context=rollouts.tokens / (ppo.rollouts.tasks * ppo.rollouts.samples) / 2,
        query_width=shapes.heads * shapes.head_dim,
    )
    parts = (rollouts.seconds, sum(training.values()))
    return ppo.steps * (max(parts) if ppo.staleness else sum(parts))


def _trainer_counts(params: Params, shapes: ModelShapes, values: dict[str, float], left: int) -> list[int]:
    """Return the numbers of trainers to try, in increasing order; the list is empty if no number fits.

    They are doublings of the smallest number on which the model fits, and the largest number up to `left`
    that `engine.sequence_parallel` divides, if the model fits on it.
    """
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
    """Return whether a rank with the settings of the profile fits its GPU; `memory` is from `memory_plan`."""
    return bool(memory["memory_bytes_per_gpu"][f"zero-{params.engine.zero_stage}"]["fits"])
