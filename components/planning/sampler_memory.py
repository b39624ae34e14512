"""Memory of the GPUs of vLLM servers, and what their key-value caches hold.

A server takes a share of each of its GPUs, which holds its part of the weights, working memory, and the cache
in all that is left.
"""

from typing import Any

from components.core.params import Params

# Share of a GPU that vLLM takes by default (--gpu-memory-utilization).
VLLM_SHARE = 0.9
# Bytes of a vLLM worker besides weights and cache: CUDA context and graphs, activations, NCCL's buffers.
VLLM_WORKING_BYTES = 4e9
# Largest number of GPUs of one vLLM server, which are those of a host.
MOST_TENSOR_PARALLEL = 8


def tensor_parallel(params: Params, values: dict[str, float]) -> int | None:
    """Return the least power of 2 of GPUs on which vLLM holds the weights and one full context.

    `values` are the values of the plan's inputs. Returns None if MOST_TENSOR_PARALLEL GPUs are too few.
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

    `values` are the values of the plan's inputs. In the result, `replicas` is the number of servers, and
    `tensor_parallel` the number of GPUs of one server, which is that of all samplers' GPUs if the model does
    not fit on them. `contexts` and `cache_tokens` are the numbers of full contexts and of tokens that the
    caches of all servers hold together.
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
        "cache_tokens": replicas * group * cache / values["kv_bytes_per_token"],
        "fits": needed is not None and needed <= gpus,
    }
