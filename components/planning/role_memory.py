"""Memory of the GPUs of trainers, samplers and judges, and the refusal of a pool if a role does not fit.

These three are the roles: trainers are the ranks that train, samplers the vLLM servers, and judges measure
kernels. `cuda-agent run`, `doctor` and `plan` use the same check. The formulas of a trainer are in
`memory_model.py`. A vLLM server takes a share of each of its GPUs, which holds its part of the weights,
working memory, and the key-value cache in all that is left.
"""

from dataclasses import dataclass

from components.core.errors import UserError
from components.core.params import Params
from components.planning.memory_model import RankMemory, rank_memory, roles_of, value_bytes
from components.planning.model_shapes import ModelShapes, policy_shapes

# Memory in bytes of the GPUs that `pool.gpu` names, from their datasheets: H20, H100 SXM, H200.
GPU_BYTES = {"h20": 96e9, "h100": 80e9, "h200": 141e9}
# Share of a GPU that vLLM takes by default (--gpu-memory-utilization).
VLLM_SHARE = 0.9
# Bytes of a vLLM worker besides weights and cache: CUDA context and graphs, activations, NCCL's buffers.
VLLM_WORKING_BYTES = 4e9
# Bytes that a sleeping vLLM keeps on the GPU: context and CUDA graphs. 0.8 to 2.4 GB were reported
# (github.com/NVIDIA-NeMo/RL, issue 223).
ASLEEP_BYTES = 2e9
# Numbers of GPUs that one vLLM server may have, which are on one host.
SERVER_GPUS = (1, 2, 4, 8)
# Size of the buckets in which new weights are gathered for the sampler (policy/checkpoint.py).
BUCKET_BYTES = 2**31


@dataclass(frozen=True)
class RoleMemory:
    """Number of GPUs of a role (trainers, samplers or judges), and the memory in use on the fullest of them.

    `parts` are bytes by the name of what uses them, such as "weights". `holds` is a text for the user on what
    the GPUs hold. `host` is the number of bytes that the role keeps in the memory of the host for each GPU.
    """

    gpus: int
    parts: dict[str, float]
    holds: str
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def memory_of_roles(params: Params, shapes: ModelShapes) -> dict[str, RoleMemory]:
    """Return the memory of each role by its name: `trainers`, `samplers` and `judges`.

    Samplers are vLLM servers, and judges measure kernels. `samplers` is left out if the trainers sample
    themselves (policy.backend transformers), but not if vLLM shares the trainers' GPUs. `judges` is left out
    if they have no GPUs of their own (pool.judges 0).
    """
    pool = params.pool
    found = {"trainers": _trainer(params, shapes)}
    if params.policy.backend != "transformers":
        found["samplers"] = _sampler(params, shapes)
    if pool.judges:
        size = float(params.sandbox.device_bytes) or GPU_BYTES[pool.gpu]
        found["judges"] = RoleMemory(pool.judges, {"task": size}, "one task at a time, at most")
    return found


def _trainer(params: Params, shapes: ModelShapes) -> RoleMemory:
    """Return the memory of the first rank of the trainers, whose GPU is the fullest.

    It is the larger of the memory during training and during sampling, in bytes by what uses it. If the
    sampler or the judge, which measures kernels, uses this GPU too, its memory is included. Not included are
    the key-value cache of the backend transformers, and a judge whose memory is not limited because
    `sandbox.device_bytes` is 0.
    """
    policy, engine, pool = params.policy, params.engine, params.pool
    size, roles, tokens, memory = GPU_BYTES[pool.gpu], roles_of(params, shapes), *_first_rank(params, shapes)
    weights = value_bytes(engine) * shapes.parameters
    awake, sleeps = 0.0, False
    if policy.backend == "transformers" and engine.zero_stage == 3:
        awake = weights
    elif policy.backend != "transformers" and not pool.samplers:
        awake, sleeps = policy.gpu_memory_share * size, policy.sleep
    judge = 0.0 if pool.judges else float(params.sandbox.device_bytes)
    kept, working = _kept(memory), _working(memory)
    training = kept | working | {"sampler": ASLEEP_BYTES if sleeps else awake}
    sampling = kept | {"sampler": awake, "judge or new weights": max(judge, BUCKET_BYTES)}
    networks = ["actor"] + ["critic"] * roles.has_critic + ["reference"] * roles.has_reference
    return RoleMemory(
        gpus=max(1, pool.trainers),
        parts=max(training, sampling, key=lambda parts: sum(parts.values())),
        holds=f"{', '.join(networks)}; {tokens:,} tokens",
        # A sleeping vLLM keeps its weights in the memory of the host.
        host=memory.host + (weights if sleeps else 0.0),
    )


def _first_rank(params: Params, shapes: ModelShapes) -> tuple[int, RankMemory]:
    """Return the tokens of the first rank's largest micro-batch, and the memory that the rank takes."""
    # A trajectory that is longer than tokens_per_microbatch has a micro-batch of its own.
    tokens = max(params.engine.tokens_per_microbatch, params.policy.context)
    return tokens, rank_memory(
        shapes,
        params.engine,
        roles_of(params, shapes),
        ranks=max(1, params.pool.trainers),
        tokens=tokens,
        row=params.policy.context,
    )


def _kept(memory: RankMemory) -> dict[str, float]:
    return {"states": memory.states, "reference": memory.reference, "context": memory.context}


def _working(memory: RankMemory) -> dict[str, float]:
    return {"gathered": memory.gathered, "gradients": memory.gradients, "computation": memory.computing}


def trainer_bytes(params: Params, shapes: ModelShapes) -> float:
    """Return the largest number of bytes that one rank takes of a GPU which it shares with sampler and judge.

    While the rank trains, a sampler with policy.sleep takes less than its share of the GPU. The difference is
    subtracted, so that the sum of the result and the sampler's share is the largest use of both together.
    """
    _, memory = _first_rank(params, shapes)
    freed = max(0.0, _sampler_bytes(params) - ASLEEP_BYTES) if params.policy.sleep else 0.0
    return sum(_kept(memory).values()) + max(0.0, sum(_working(memory).values()) - freed)


def _context_bytes(params: Params, shapes: ModelShapes) -> float:
    """Return the bytes of the keys and values of one sequence that fills the context window."""
    token_values = 2 * shapes.layers * shapes.kv_heads * shapes.head_dim
    return value_bytes(params.engine) * token_values * params.policy.context


def _sampler_bytes(params: Params) -> float:
    return GPU_BYTES[params.pool.gpu] * (
        VLLM_SHARE if params.pool.samplers else params.policy.gpu_memory_share
    )


def tensor_parallel(params: Params, shapes: ModelShapes) -> int | None:
    """Return the least power of 2 of GPUs on which one vLLM server holds the weights and one full context.

    A full context is the keys and values of a sequence that fills the context window. They and the weights
    have the precision `engine.dtype`. Returns None if the largest number in SERVER_GPUS is too small.
    """
    each = _sampler_bytes(params) - VLLM_WORKING_BYTES
    needed = value_bytes(params.engine) * shapes.parameters + _context_bytes(params, shapes)
    return next((gpus for gpus in SERVER_GPUS if gpus * each >= needed), None)


def _sampler(params: Params, shapes: ModelShapes) -> RoleMemory:
    gpus = max(1, params.pool.samplers)
    group = min(tensor_parallel(params, shapes) or gpus, gpus)
    weights = value_bytes(params.engine) * shapes.parameters / group
    cache = max(0.0, _sampler_bytes(params) - weights - VLLM_WORKING_BYTES)
    contexts = gpus // group * int(group * cache // _context_bytes(params, shapes))
    return RoleMemory(
        gpus=gpus,
        parts={"weights": weights, "working": VLLM_WORKING_BYTES, "cache": cache},
        holds=f"{contexts} full contexts in servers of {group} GPUs",
    )


def refusal(params: Params, shapes: ModelShapes) -> str:
    """Return a sentence that says which role does not fit its GPUs and what to change, or "" if all fit.

    The roles that are checked are trainers, on the first GPU, and samplers, which are vLLM servers. A model
    whose attention heads engine.sequence_parallel ranks cannot share is refused too.
    """
    pool, engine, size = params.pool, params.engine, GPU_BYTES[params.pool.gpu]
    shared = engine.sequence_parallel
    heads, kv_heads = shapes.heads, shapes.kv_heads
    is_divisible = heads % shared == 0 and (kv_heads % shared == 0 or shared % kv_heads == 0)
    if shared > 1 and (shapes.is_eager or not is_divisible):
        return (
            f"engine.sequence_parallel: {shared} ranks cannot share the sequences of {shapes.name} "
            f"({heads} heads, {kv_heads} key-value heads{', eager attention' if shapes.is_eager else ''}); "
            "take a divisor of both, or 1."
        )
    trainer = _trainer(params, shapes)
    if trainer.total > size:
        return (
            f"pool.trainers: {trainer.gpus} ranks that train {shapes.name} need "
            f"{trainer.total / 1e9:,.0f} GB on the first GPU, and it has {size / 1e9:,.0f}; raise "
            "pool.trainers or engine.sequence_parallel, set engine.cpu_offload or engine.activation_offload, "
            "use policy.adapter, or lower policy.context and engine.tokens_per_microbatch."
        )
    needed, gpus = tensor_parallel(params, shapes), max(1, pool.samplers)
    if params.policy.backend == "transformers" or (needed and needed <= gpus):
        return ""
    more = f"set pool.samplers to {needed}" if pool.samplers else "raise it"
    return (
        f"{'pool.samplers' if pool.samplers else 'policy.gpu_memory_share'}: vLLM on {gpus} GPUs of "
        f"{size / 1e9:,.0f} GB does not hold the weights of {shapes.name} "
        f"({value_bytes(engine) * shapes.parameters / 1e9:,.0f} GB) and one context of "
        f"{params.policy.context:,} tokens ({_context_bytes(params, shapes) / 1e9:,.0f} GB); "
        f"{more if needed else 'lower policy.context'}."
    )


def check_fits(params: Params) -> None:
    """Raise UserError if trainers or samplers (vLLM servers) cannot fit the memory of the GPU `pool.gpu`.

    Also raises it if engine.sequence_parallel does not fit the attention heads of the model, or if the policy
    cannot be read. Nothing is checked on the cpu.
    """
    if params.device == "cuda" and (sentence := refusal(params, policy_shapes(params))):
        raise UserError(sentence)
