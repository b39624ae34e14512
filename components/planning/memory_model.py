"""Memory of one rank of the trainer, on the GPU and in the host, from a model's shapes and the settings.

With P parameters, N ranks, hidden states of width H and T tokens of a rank (a micro-batch's tokens divided by
`sequence_parallel`), these are the bytes in bfloat16 with AdamW:

- Trained networks (actor, critic): 2P weights, 12P float32 master weights and moments, and 4P accumulated
  gradients, which the trainer sums in float32. ZeRO 1 divides the 12P by N, ZeRO 2 the 4P too, ZeRO 3
  everything (Rajbhandari et al. 2020, section 5, where gradients take 2P). With LoRA adapters, a network is
  2P frozen weights and 18 bytes for each parameter of its adapters.
- The reference, a frozen network of 2P.
- Activations under checkpointing: the input of each layer, 2TH bytes, and the working memory of one layer.
  That is 2T(4H + 5Q + 4K) bytes for attention, where Q and K are the widths of queries and keys, 12TI for a
  dense feed-forward layer of width I, and 4Tk(2H + 3I) for k experts of width I per token. RMS norms keep
  their input in float32 and the normalised input for the backward pass: 12TH for the two norms of a layer,
  and 6T(Q + K) in models that normalise queries and keys.
- The output head: at most four float32 tensors of logits of LOGITS_BYTES (training/output_head.py).

The largest use of the GPU is in the backward pass, or in the optimizer's step if its temporary copies are
larger than the activations.
"""

from dataclasses import dataclass

from components.core.params import Params
from components.core.stage_params import Engine
from components.planning.model_shapes import ModelShapes

# Limit in bytes of one float32 tensor of logits in the trainer (training/output_head.py).
LOGITS_BYTES = 2**28
# Largest number of elements in a gradient bucket of DeepSpeed (training/engine.py).
REDUCE_BUCKET = 500_000_000
# Elements that a step of ZeRO 3 updates at once (DeepSpeed's default of `sub_group_size`).
SUB_GROUP = 1_000_000_000
# Bytes of the CUDA context, NCCL's buffers and the libraries' workspaces of a rank.
CONTEXT_BYTES = 3e9
ADAM_BYTES = 8.0  # two float32 moments
GRADIENT_BYTES = 4.0
MASTER_BYTES = 4.0


@dataclass(frozen=True)
class Roles:
    """Networks that a training stage holds besides the actor, and the number of parameters that it trains.

    `has_reference` says whether it holds the reference policy, which is the policy at the start of the stage.
    `adapter_parameters` is the number of parameters of the adapters of one network, or 0 if all parameters
    are trained. A critic is trained in the same way as the actor.
    """

    has_critic: bool
    has_reference: bool
    adapter_parameters: int = 0


@dataclass(frozen=True)
class RankMemory:
    """Memory in bytes of one rank of the trainer at its largest use.

    `states` are weights, optimizer state and accumulated gradients of the trained networks. `reference` is
    the reference policy if it stays on the GPU, and `moved_reference` is the reference policy if it is in
    host memory and on the GPU only while it computes. `gathered` are the complete parameters that ZeRO 3
    collects for the layers that are being computed, and `gradients` the gradients that are not yet divided
    among the ranks. `checkpoints` are the inputs of all layers. `layer` is the working memory of one layer,
    and `logits` that of the output head; only one of them is in use at a time. `step` are temporary copies
    that the optimizer's step makes. `context` is what CUDA and its libraries use. `host` is in the memory of
    the host: the offloaded optimizer state and gradients, reference policy and inputs of the layers.
    """

    states: float
    reference: float
    gathered: float
    gradients: float
    checkpoints: float
    layer: float
    logits: float
    step: float
    moved_reference: float
    context: float
    host: float

    @property
    def computing(self) -> float:
        """Return the bytes of activations, logits and temporary copies on the GPU at the largest use.

        They are the temporary copies of the optimizer's step if these are larger. The reference policy counts
        while it is moved to the GPU.
        """
        working = max(self.layer, self.logits)
        return max(self.step, self.checkpoints + working, self.moved_reference + working)

    @property
    def total(self) -> float:
        """Return the bytes on the GPU at the largest use."""
        return sum((self.states, self.reference, self.context, self.gathered, self.gradients, self.computing))


def roles_of(params: Params, shapes: ModelShapes) -> Roles:
    """Return which networks besides the actor at least one of the two PPO stages needs.

    The model has the shapes `shapes`. Raises UserError if `policy.adapter.targets` names a layer that cannot
    have an adapter.
    """
    adapter = params.policy.adapter
    stages = (params.warmup, params.agentic)
    return Roles(
        has_critic=any(ppo.advantages == "critic" for ppo in stages),
        # With adapters, the weights below them are those of the reference.
        has_reference=not adapter.rank and any(ppo.measure_kl or ppo.kl_coefficient > 0 for ppo in stages),
        adapter_parameters=shapes.adapter_parameters(adapter),
    )


def value_bytes(engine: Engine) -> float:
    """Return the bytes of one value in the precision `engine.dtype` of trainers and vLLM servers."""
    return 2.0 if engine.dtype == "bfloat16" else 4.0


def rank_memory(
    shapes: ModelShapes, engine: Engine, roles: Roles, *, ranks: float, tokens: float, row: float
) -> RankMemory:
    """Return the memory of one of `ranks` ranks that train a model of these shapes.

    `tokens` is the number of tokens of the longest forward pass, which `engine.sequence_parallel` ranks
    share, and `row` that of the longest trajectory. `roles` says which networks there are besides the actor.
    """
    size = value_bytes(engine)
    # Under ZeRO 0 in float32, the weights themselves are updated and there is no master copy.
    master = 0.0 if engine.zero_stage == 0 and engine.dtype == "float32" else MASTER_BYTES
    state_ranks, gradient_ranks, weights_ranks = (
        ranks if engine.zero_stage >= stage else 1.0 for stage in (1, 2, 3)
    )

    networks = 2 if roles.has_critic else 1
    trained_each = float(roles.adapter_parameters or shapes.parameters)
    trained = networks * trained_each
    frozen = networks * shapes.parameters if roles.adapter_parameters else 0.0
    weights = size * (trained + frozen) / weights_ranks
    optimizer = (master + ADAM_BYTES) * trained / state_ranks
    gradients = GRADIENT_BYTES * trained / gradient_ranks
    offloaded = 0.0
    if engine.cpu_offload and engine.zero_stage >= 1:
        # ZeRO 1 accumulates complete gradients on the GPU, ZeRO 2 and 3 the rank's part in the host.
        offloaded = optimizer + (gradients if engine.zero_stage >= 2 else 0.0)
    reference = size * shapes.parameters / weights_ranks if roles.has_reference else 0.0

    layer_gradients = trained_each / shapes.parameters * shapes.layer_parameters
    updated = trained_each / state_ranks
    layers_at_once = 2 * shapes.layer_parameters + shapes.embedding_parameters
    gathered = size * layers_at_once if engine.zero_stage >= 3 and ranks > 1 else 0.0

    local = tokens / engine.sequence_parallel
    attention = size * _attention_elements(shapes, engine.sequence_parallel, local, row)
    norms = (4.0 + size) * _norm_elements(shapes, local)
    tile = min(local, engine.mlp_tokens) if engine.mlp_tokens else local
    dense = 6.0 * tile * shapes.feed_forward
    # `engine.mlp_tokens` does not divide the tokens for experts.
    experts = 2.0 * local * shapes.experts_per_token * (2 * shapes.hidden + 3 * shapes.expert_width)
    feed_forward = size * max(dense, experts)
    layer = attention + norms + feed_forward
    kept = shapes.layers * (size * local * shapes.hidden if engine.activation_checkpointing else layer)
    is_offloaded = engine.activation_offload and engine.activation_checkpointing
    return RankMemory(
        states=weights + optimizer + gradients - offloaded,
        reference=0.0 if engine.reference_offload else reference,
        gathered=gathered,
        gradients=2 * size * layer_gradients + 4.0 * min(trained_each, REDUCE_BUCKET),
        checkpoints=0.0 if is_offloaded else kept,
        layer=layer,
        logits=4.0 * min(LOGITS_BYTES, 4.0 * local * shapes.vocabulary)
        # The gradients of the hidden states, in float32 and in the precision of the weights.
        + (4.0 + size) * local * shapes.hidden
        # The gradient of the output head.
        + (0.0 if roles.adapter_parameters else size * shapes.vocabulary * shapes.hidden),
        step=0.0
        if offloaded
        else MASTER_BYTES * (min(SUB_GROUP, updated) if engine.zero_stage >= 3 else updated),
        # ZeRO 3 gathers an offloaded reference layer by layer.
        moved_reference=reference if engine.reference_offload and engine.zero_stage < 3 else 0.0,
        context=CONTEXT_BYTES,
        host=offloaded + (reference if engine.reference_offload else 0.0) + (kept if is_offloaded else 0.0),
    )


def _attention_elements(shapes: ModelShapes, sequence_parallel: int, tokens: float, row: float) -> float:
    """Return the number of elements that a layer's attention keeps in the forward and backward pass.

    `tokens` is the number of tokens of the rank, and `row` that of the longest trajectory. With sequence
    parallelism (Ulysses), each rank has a part of the heads, and keys and values are repeated if they have
    fewer heads than there are ranks. Eager attention keeps four copies of the scores between all pairs of a
    trajectory's tokens.
    """
    queries, keys = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    repeated = max(1.0, sequence_parallel / shapes.kv_heads)
    scores = 4.0 * shapes.heads * row**2 if shapes.is_eager else 0.0
    return tokens * (4 * shapes.hidden + 5 * queries + 4 * keys * repeated) + scores


def _norm_elements(shapes: ModelShapes, tokens: float) -> float:
    """Return the number of elements that the RMS norms of a layer normalise for `tokens` tokens of the rank.

    A norm keeps each element twice: its input in float32, and the normalised input in the precision of the
    weights. If that is float32, the input needs no copy, but is itself kept for the norm. The norms of
    gpt-oss keep the normalised input in float32 too; the 2 bytes more for each element are not counted, since
    the attention scores of gpt-oss are far larger. Under sequence parallelism, a rank normalises all heads of
    its own tokens.
    """
    queries_keys = (shapes.heads + shapes.kv_heads) * shapes.head_dim if shapes.has_query_key_norms else 0
    return tokens * (2.0 * shapes.hidden + queries_keys)
