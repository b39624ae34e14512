"""Shapes of causal language models, from which the numbers of their parameters and of LoRA adapters follow.

The shapes are read from the `config.json` of a Hugging Face folder, or from a public configuration by name,
so that a plan needs neither weights nor transformers. Supported are the dense models Llama, Qwen2 (and
Qwen2.5) and Qwen3, and the mixtures of experts Qwen3-MoE and gpt-oss. The numbers equal those of the models
of transformers and the adapters of peft (tests/unit/test_planner_memory.py).
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.core.errors import UserError
from components.core.params import Policy

CONFIG = "config.json"
# Fields of config.json that give the shapes, of public models (config.json of the models of these names).
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "Qwen3-32B": {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-Coder-7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-Coder-32B": {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
}
# Public models of the size that the profiles of params.yaml are made for, by profile.
PROFILE_MODELS = {"hf": "Qwen3-8B", "hf-adapter": "Qwen3-8B", "h20-pool": "Qwen3-32B"}
MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss")


class UnknownModelType(UserError):
    """Error raised for a type of model whose number of parameters is not known here."""


@dataclass(frozen=True)
class Linear:
    """The linear layers of one name, of which a model has `count`, each with a weight [outputs, inputs]."""

    name: str
    inputs: int
    outputs: int
    count: int


@dataclass(frozen=True)
class ModelShapes:
    """Shapes of a causal language model that memory and time depend on.

    `active_parameters` are those that compute one token: all except the embeddings, of which a token reads
    one row, and the experts that the router does not choose. `feed_forward` is the inner width of a dense
    feed-forward layer, and `expert_width` that of one expert; each is 0 if there is none. A token uses
    `experts_per_token` experts. `is_eager` says that transformers has only eager attention for the model,
    whose memory grows with the square of the length. `has_query_key_norms` says that the attention normalises
    the queries and keys of each head. `linears` are the linear layers that can have an adapter
    (policy/adapter.py): of a mixture of experts only those of the attention.
    """

    name: str
    parameters: float
    active_parameters: float
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    expert_width: int
    experts_per_token: int
    is_tied: bool
    is_eager: bool
    has_query_key_norms: bool
    linears: tuple[Linear, ...]

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of embeddings and output head, which are one matrix if they are tied."""
        return (1 if self.is_tied else 2) * self.vocabulary * self.hidden

    @property
    def layer_parameters(self) -> float:
        """Mean number of parameters of a layer."""
        return (self.parameters - self.embedding_parameters) / self.layers

    def adapter_parameters(self, rank: int, targets: Collection[str]) -> int:
        """Return the number of parameters of LoRA adapters of this rank (arXiv 2106.09685, section 4.1).

        `targets` are names of linear layers, of which only the part after the last dot counts. If it is
        empty, all entries of `linears` get an adapter. Raises UserError if the model has no such layer.
        """
        names = {target.rpartition(".")[2] for target in targets}
        if unknown := sorted(names - {linear.name for linear in self.linears}):
            raise UserError(
                f"policy.adapter.targets: {self.name} has no linear layer {unknown[0]} that can have an "
                f"adapter; give some of {', '.join(linear.name for linear in self.linears)}, or [] for all."
            )
        chosen = [linear for linear in self.linears if not names or linear.name in names]
        return sum(rank * (linear.inputs + linear.outputs) * linear.count for linear in chosen)


def read_shapes(folder: Path) -> ModelShapes:
    """Return the shapes of the model in a Hugging Face folder.

    Raises UserError, which names the file and the field, if `config.json` is missing, is damaged, or
    describes a model that is not supported.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({' '.join(str(error).split())}); give a whole Hugging Face folder."
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: an object is expected; give a whole Hugging Face folder.")
    return shapes_of(config, str(path))


def named_shapes(name: str) -> ModelShapes:
    """Return the shapes of a public model; raises UserError if `name` is not in CONFIGURATIONS."""
    if name not in CONFIGURATIONS:
        raise UserError(f"--model {name}: no such model; give one of {', '.join(CONFIGURATIONS)}.")
    return shapes_of(CONFIGURATIONS[name], name)


def policy_shapes(policy: Policy, profile: str) -> ModelShapes:
    """Return the shapes of the policy that a profile trains.

    If the folder of the policy, policy.source or for a champion policy.base, is not on this machine, the
    shapes are those of the public model in PROFILE_MODELS. Raises UserError if the folder is missing and the
    profile is not in PROFILE_MODELS, or if the folder's model cannot be planned.
    """
    field, source = ("base", policy.base) if policy.source == "champion" else ("source", policy.source)
    if source == "scratch":
        return scratch_shapes(policy)
    if Path(source).is_dir():
        return read_shapes(Path(source))
    if profile in PROFILE_MODELS:
        return named_shapes(PROFILE_MODELS[profile])
    raise UserError(
        f"policy.{field}: {source} is no folder; give the folder of a Hugging Face model, "
        f"or plan for the size of a public model with --model ({', '.join(CONFIGURATIONS)})."
    )


def scratch_shapes(policy: Policy) -> ModelShapes:
    """Return the shapes of the Qwen3 that the cold start makes from `policy` (bootstrap/cold_start.py)."""
    config = {
        "model_type": "qwen3",
        "hidden_size": policy.hidden,
        "intermediate_size": policy.feed_forward,
        "num_hidden_layers": policy.layers,
        "num_attention_heads": policy.heads,
        "num_key_value_heads": policy.kv_heads,
        "head_dim": policy.head_dim,
        "vocab_size": policy.vocabulary,
        "tie_word_embeddings": True,
    }
    return shapes_of(config, "policy.*")


def shapes_of(config: Mapping[str, Any], name: str) -> ModelShapes:
    """Return the shapes that the content of a `config.json` describes.

    `name` names the model, and the file in messages. Raises UserError, which names the field, if a field is
    missing or not a positive integer, or if the type of the model is not supported.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise UnknownModelType(
            f"{name}: model_type {kind!r} is not among those whose memory can be planned "
            f"({', '.join(MODEL_TYPES)}); plan with --model and the model of the nearest size."
        )

    def size(field: str, default: int | None = None) -> int:
        value = default if config.get(field) is None else config[field]
        if type(value) is not int or value < 1:
            raise UserError(
                f"{name}: {field} = {value!r}, a positive integer is expected; correct the field."
            )
        return value

    hidden, layers, vocabulary = size("hidden_size"), size("num_hidden_layers"), size("vocab_size")
    heads = size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    head_dim = size("head_dim", hidden // heads)
    queries, keys = heads * head_dim, kv_heads * head_dim

    linears = [
        Linear("q_proj", hidden, queries, layers),
        Linear("k_proj", hidden, keys, layers),
        Linear("v_proj", hidden, keys, layers),
        Linear("o_proj", queries, hidden, layers),
    ]
    # Numbers of parameters of one layer that are not weights of linear layers: biases and norms.
    rest = 2 * hidden
    if kind == "qwen2":
        rest += queries + 2 * keys
    elif config.get("attention_bias", kind == "gpt_oss"):
        rest += queries + 2 * keys + hidden
    has_query_key_norms = kind in ("qwen3", "qwen3_moe")
    if has_query_key_norms:
        rest += 2 * head_dim
    if kind == "gpt_oss":
        rest += heads  # attention sinks
    biases = 0
    if kind == "llama" and config.get("mlp_bias"):
        biases = 2 * size("intermediate_size") + hidden

    dense_layers = sum(not _has_experts(config, layer) for layer in range(layers))
    feed_forward = size("intermediate_size") if dense_layers else 0
    if dense_layers == layers:
        linears += [
            Linear("gate_proj", hidden, feed_forward, layers),
            Linear("up_proj", hidden, feed_forward, layers),
            Linear("down_proj", feed_forward, hidden, layers),
        ]
    # Numbers of parameters of a router, and of one expert of it.
    router, expert, experts, chosen, width = 0, 0, 0, 0, 0
    if dense_layers < layers:
        width = size("moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size")
        experts = size("num_local_experts" if "num_local_experts" in config else "num_experts")
        chosen = size("num_experts_per_tok")
        router, expert = experts * hidden, 3 * hidden * width
        if kind == "gpt_oss":
            router, expert = router + experts, expert + 2 * width + hidden

    is_tied = bool(config.get("tie_word_embeddings", False))
    sparse_layers = layers - dense_layers
    used_by_every_token = (
        layers * (2 * hidden * queries + 2 * hidden * keys + rest)
        + dense_layers * (3 * hidden * feed_forward + biases)
        + sparse_layers * router
        + hidden  # the last norm
        + vocabulary * hidden  # the output head
    )
    return ModelShapes(
        name=name,
        parameters=used_by_every_token
        + sparse_layers * experts * expert
        + (0 if is_tied else vocabulary * hidden),
        active_parameters=used_by_every_token + sparse_layers * chosen * expert,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        feed_forward=feed_forward,
        expert_width=width,
        experts_per_token=chosen,
        is_tied=is_tied,
        is_eager=kind == "gpt_oss",
        has_query_key_norms=has_query_key_norms,
        linears=tuple(linears),
    )


def _has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer has experts; Qwen3-MoE may have dense layers between those with experts."""
    if config["model_type"] == "qwen3_moe":
        return (
            layer not in (config.get("mlp_only_layers") or ())
            and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
        )
    return bool(config["model_type"] == "gpt_oss")
