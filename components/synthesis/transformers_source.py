"""Write the source of a task around a module mined from transformers, for given sizes of the inputs."""

import math
from typing import Any

from components.synthesis.mined_operators import TransformersModule

# Configuration values that depend on the hidden size, as multiples of the hidden size.
SCALED: dict[str, float] = {
    **dict.fromkeys(
        "hidden_size d_model n_embd embed_dim dim hidden_dim embedding_size out_hidden_size".split(), 1.0
    ),
    **dict.fromkeys(
        (
            "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff ffn_hidden_size "
            "shared_expert_intermediate_size"
        ).split(),
        2.0,
    ),
    **dict.fromkeys("moe_intermediate_size mlp_intermediate_size".split(), 0.5),
    **dict.fromkeys(
        (
            "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
            "decoder_attention_heads attention_heads"
        ).split(),
        1 / 64,
    ),
    **dict.fromkeys("num_key_value_heads num_kv_heads".split(), 1 / 128),
}
FIXED: dict[str, Any] = {
    "head_dim": 64,
    "d_kv": 64,
    "n_inner": None,
    "max_position_embeddings": 2048,
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), 8),
    **dict.fromkeys("num_experts_per_tok moe_top_k top_k num_experts_per_token".split(), 2),
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 1000,
    "_attn_implementation": "eager",
    "attn_implementation": "eager",
    "use_cache": False,
    "output_attentions": False,
    "chunk_size_feed_forward": 0,
}
SOURCE = """{code}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
{config}        self.block = {init}

    def forward(self, {arguments}):
        return {call}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""


def scale_config(config: dict[str, Any], hidden: int) -> dict[str, Any]:
    """Return the configuration with values that fit this hidden size.

    The fields of `config` that SCALED names become multiples of the hidden size, and those that FIXED names
    get their fixed values.
    """
    return (
        config
        | {key: FIXED[key] for key in config if key in FIXED}
        | {key: max(1, int(SCALED[key] * hidden)) for key in config if key in SCALED}
    )


def write_module_source(module: TransformersModule, batch: int, length: int, hidden: int) -> str:
    """Return the Python source of a task with the module, for inputs of these sizes.

    `batch`, `length` and `hidden` are the axes of the main input. An image input is a square whose side is
    the root of `length`.
    """
    values = {
        "batch": batch,
        "length": length,
        "hidden": hidden,
        "twice": 2 * hidden,
        "heads": max(1, hidden // 64),
        "side": math.isqrt(length),
    }
    settings = ", ".join(f"{key}={value!r}" for key, value in scale_config(module.config, hidden).items())
    config = f"        config = SimpleNamespace({settings})\n" if "config" in module.init else ""
    return SOURCE.format(
        code=module.code,
        config=config,
        init=module.init.format(**values),
        arguments=", ".join("xyzw"[: len(module.inputs)]),
        call=module.call,
        inputs=", ".join(text.format(**values) for text in module.inputs),
    )
