"""Memory of the GPUs of trainers, samplers and judges, and the refusal of pools in which a role cannot fit.

The memory of the trainers is in `memory_choices.py`, and that of vLLM's servers in `sampler_memory.py`.
"""

from typing import Any

from components.core.errors import UserError
from components.core.params import Params
from components.planning.capacity import GPUS, default_inputs
from components.planning.memory_choices import memory_plan, options_of
from components.planning.model_shapes import ModelShapes, UnknownModelType, policy_shapes
from components.planning.sampler_memory import sampler_memory, tensor_parallel


def pool_plan(params: Params, values: dict[str, float], memory: dict[str, Any]) -> dict[str, Any]:
    """Return the number of GPUs of each role, the bytes in use on one of them, and whether they fit.

    The result has the keys `trainers`, `samplers` and `judges`. The entry `samplers` is None if the trainer
    samples itself (the backend transformers). `values` are the values of the plan's inputs, and `memory` is
    the record of `memory_plan`.
    """
    chosen = memory["memory_bytes_per_gpu"][f"zero-{params.engine.zero_stage}"]
    judge = float(params.sandbox.device_bytes) or values["gpu_memory"]
    return {
        "trainers": {
            "gpus": int(values["trainer_gpus"]),
            "total": chosen["total"],
            "fits": chosen["fits"],
        },
        "samplers": None if params.policy.backend == "transformers" else sampler_memory(params, values),
        "judges": {"gpus": params.pool.judges, "bytes": {"task": judge}, "total": judge, "fits": True},
    }


def refusal(params: Params, shapes: ModelShapes, values: dict[str, float], memory: dict[str, Any]) -> str:
    """Return a sentence that says which role cannot fit and what to change, or "" if all roles fit.

    `values` are the values of the plan's inputs, and `memory` is the record of `memory_plan`. A role that
    would leave less than the reserve of the plan free is not refused, because the estimate may be too high.
    """
    size = values["gpu_memory"]
    chosen = memory["memory_bytes_per_gpu"][f"zero-{params.engine.zero_stage}"]
    if chosen["total"] > size:
        smallest = memory["smallest"]
        mend = (
            f"change it with {options_of(smallest, params.engine)}"
            if smallest and chosen["training"] >= chosen["sampling"]
            else "raise pool.trainers, use policy.adapter, or lower policy.context and "
            "engine.tokens_per_microbatch"
        )
        return (
            f"pool.trainers: {values['trainer_gpus']:g} ranks that train {shapes.name} need "
            f"{chosen['total'] / 1e9:,.0f} GB on the first GPU, and it has {size / 1e9:,.0f}; {mend}."
        )
    if params.policy.backend == "transformers":
        return ""
    sampler = sampler_memory(params, values)
    if sampler["fits"]:
        return ""
    needed = tensor_parallel(params, values)
    key = "pool.samplers" if params.pool.samplers else "policy.gpu_memory_share"
    if needed is None:
        mend = "lower policy.context"
    else:
        mend = f"set pool.samplers to {needed}" if params.pool.samplers else "raise it"
    return (
        f"{key}: vLLM on {sampler['gpus']} GPUs of {size / 1e9:,.0f} GB does not hold the weights of "
        f"{shapes.name} ({2 * values['parameters'] / 1e9:,.0f} GB) and one context of "
        f"{params.policy.context:,} tokens "
        f"({values['kv_bytes_per_token'] * params.policy.context / 1e9:,.0f} GB); {mend}."
    )


def check_fits(params: Params) -> None:
    """Raise UserError if a role of the pool cannot fit the memory of the GPU `pool.gpu`.

    A role is the trainers, samplers or judges. Nothing is checked on the cpu, or for a type of model whose
    memory is not known. The folder that policy.source names must exist.
    """
    if params.device != "cuda":
        return
    try:
        shapes = policy_shapes(params.policy, "")
    except UnknownModelType:
        return
    values = {
        name: item.value for name, item in default_inputs(params, GPUS[params.pool.gpu], shapes).items()
    }
    if sentence := refusal(params, shapes, values, memory_plan(params, shapes, values)):
        raise UserError(sentence)
