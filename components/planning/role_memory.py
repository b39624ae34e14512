"""Memory of the GPUs of each role of a pool, and the refusal of pools in which a role cannot fit.

The memory of the trainers is in `memory_choices.py`. A vLLM server takes a share of each of its GPUs, which
holds its part of the weights, working memory, and the key-value cache in all that is left.
"""

from typing import Any

from components.core.errors import UserError
from components.core.params import Params
from components.planning.capacity import GPUS, default_inputs
from components.planning.memory_choices import memory_plan, options_of
from components.planning.model_shapes import ModelShapes, UnknownModelType, policy_shapes

# Share of a GPU that vLLM takes by default (--gpu-memory-utilization).
VLLM_SHARE = 0.9
# Bytes of a vLLM worker besides weights and cache: CUDA context and graphs, activations, NCCL's buffers.
VLLM_WORKING_BYTES = 4e9
# Largest number of GPUs of one vLLM server, which are those of a host.
MOST_TENSOR_PARALLEL = 8


def tensor_parallel(params: Params, values: dict[str, float]) -> int | None:
    """Return the least power of 2 of GPUs on which vLLM holds the weights and one full context.

    Returns None if MOST_TENSOR_PARALLEL are too few.
    """
    context = values["kv_bytes_per_token"] * params.policy.context
    each = _vllm_share(params) * values["gpu_memory"] - VLLM_WORKING_BYTES
    gpus = 1
    while gpus <= MOST_TENSOR_PARALLEL:
        if gpus * each >= 2.0 * values["parameters"] + context:
            return gpus
        gpus *= 2
    return None


def _vllm_share(params: Params) -> float:
    return VLLM_SHARE if params.pool.samplers else params.policy.gpu_memory_share


def sampler_memory(params: Params, values: dict[str, float]) -> dict[str, Any]:
    """Return the memory in bytes of one GPU of a vLLM server by part, with the servers' sizes and capacity.

    `values` are the values of the plan's inputs. In the result, `tensor_parallel` is the number of GPUs of
    one server, which is that of all samplers' GPUs if even these are too few, and `replicas` the number of
    servers. `contexts` is the number of full contexts that the caches of all servers hold together.
    """
    gpus = int(values["sampler_gpus"])
    needed = tensor_parallel(params, values)
    group = min(needed or gpus, gpus)
    share = _vllm_share(params) * values["gpu_memory"]
    weights = 2.0 * values["parameters"] / group
    cache = max(0.0, share - weights - VLLM_WORKING_BYTES)
    context = values["kv_bytes_per_token"] * params.policy.context
    replicas = gpus // group
    return {
        "gpus": gpus,
        "tensor_parallel": group,
        "replicas": replicas,
        "bytes": {"weights": weights, "working": VLLM_WORKING_BYTES, "cache": cache},
        "total": max(share, weights + VLLM_WORKING_BYTES),
        "contexts": replicas * int(group * cache // context),
        "fits": needed is not None and needed <= gpus,
    }


def pool_plan(params: Params, values: dict[str, float], memory: dict[str, Any]) -> dict[str, Any]:
    """Return each role's number of GPUs, the bytes in use on one of them, and whether they fit, by role.

    `values` are the values of the plan's inputs, and `memory` is the record of `memory_plan`. `samplers` is
    None if the trainer samples.
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

    Nothing is checked on the cpu, or for a type of model whose memory is not known. The folder that
    policy.source names must be there.
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
