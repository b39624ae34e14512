"""Claims about the planned memory of a rank: exact shapes, ZeRO's states, an independent table."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_memory import kept_sizes
from public_models import CONFIGURATIONS, config_of, public_shapes
from transformers import AutoModelForCausalLM, PreTrainedModel

from components.bootstrap.cold_start import new_model
from components.core.config import resolve
from components.core.errors import UserError
from components.core.params import Adapter
from components.planning import memory_model, role_memory
from components.planning.memory_model import RankMemory, Roles, rank_memory
from components.planning.model_shapes import policy_shapes, shapes_of
from components.policy import checkpoint
from components.policy.adapter import add_adapter
from components.training import document_attention, output_head
from components.training.deepspeed_config import deepspeed_config
from components.training.engine import DTYPES
from components.training.networks import tile_mlps


# DeepSpeed's ZeRO divides states as in the first figure of its paper (arXiv 1910.02054), there for 2 bytes a
# gradient; the trainer sums gradients in 4.
@pytest.mark.parametrize(
    ("stage", "gigabytes", "gradients"), [(0, 120, 1), (1, 31.4, 1), (2, 16.6, 1 / 64), (3, 1.88, 1 / 64)]
)
def test_states_are_those_of_the_zero_papers_first_figure(
    stage: int, gigabytes: float, gradients: float
) -> None:
    shapes = replace(public_shapes("Qwen3-8B"), parameters=7.5e9)
    engine = resolve("h20-pool", (f"engine.zero_stage={stage}",)).params.engine
    found = rank_memory(shapes, engine, Roles(False, False), ranks=64, tokens=1, row=1).states
    assert found / 1e9 == pytest.approx(gigabytes + gradients * 2 * 7.5, abs=0.05)


# Numbers of parameters: of each model as published, and of adapters of rank 16 in all linear layers except
# the output head; None where making them takes seconds and another model has the same layers.
EXPECTED = {
    "Qwen3-8B": (8_190_735_360, 43_646_976),
    "Qwen3-32B": (32_762_123_264, None),
    "Qwen3-30B-A3B": (30_532_122_624, 13_369_344),
    "Qwen2.5-Coder-7B": (7_615_616_512, 40_370_176),
    "Qwen2.5-Coder-32B": (32_763_876_352, None),
    "Llama-3.1-8B": (8_030_261_248, 41_943_040),
    "SmolLM2-135M": (134_515_008, None),
    "SmolLM2-1.7B": (1_711_376_384, None),
    "gpt-oss-20b": (20_914_757_184, 7_962_624),
}


def meta_model(config: dict[str, Any]) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(config))
    return model


@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_numbers_of_parameters_are_those_of_the_published_model(name: str) -> None:
    shapes = public_shapes(name)
    assert shapes.parameters == EXPECTED[name][0]
    if EXPECTED[name][1] is not None:
        assert shapes.adapter_parameters(Adapter(rank=16, alpha=16, targets=[])) == EXPECTED[name][1]


TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 128,
}


@pytest.mark.parametrize(
    "config",
    [
        TINY | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        TINY | {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True},
        TINY | {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
        TINY | {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 32, "attention_bias": True},
        TINY
        | {
            "model_type": "qwen3_moe",
            "num_key_value_heads": 2,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
        TINY
        | {
            "model_type": "gpt_oss",
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ],
    ids=lambda config: config["model_type"],
)
@pytest.mark.parametrize("targets", [[], ["q_proj", "self_attn.o_proj"]])
def test_the_config_of_a_saved_folder_gives_the_numbers_of_the_model_and_of_peft(
    config: dict[str, Any], targets: list[str], tmp_path: Path
) -> None:
    model = meta_model(config)
    model.config.save_pretrained(tmp_path)
    shapes = policy_shapes(resolve("hf", (f"policy.source={tmp_path}",)).params)
    assert shapes.parameters == model.num_parameters()
    adapter = Adapter(rank=3, alpha=8, targets=targets)
    add_adapter(model, adapter)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert shapes.adapter_parameters(adapter) == trained > 0


def test_a_policy_from_scratch_has_the_planned_number_of_parameters() -> None:
    params = resolve("smoke").params
    with torch.device("meta"):
        model = new_model(params, params.policy.vocabulary)
    assert policy_shapes(params).parameters == model.num_parameters()


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "mama"}', '{"model_type": "vit"}'])
def test_a_config_that_is_no_language_model_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json: transformers cannot make this model"):
        policy_shapes(resolve("hf", (f"policy.source={tmp_path}",)).params)


def test_a_target_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"no linear layer gate that can have an adapter; give some of k_proj"
    ):
        public_shapes("Qwen3-30B-A3B").adapter_parameters(Adapter(rank=8, alpha=8, targets=["gate"]))


def test_the_shapes_of_a_champion_are_those_of_its_base(tmp_path: Path) -> None:
    config_of(CONFIGURATIONS["Llama-3.1-8B"]).save_pretrained(tmp_path)
    params = resolve("hf", ("policy.source=champion", f"policy.base={tmp_path}")).params
    assert policy_shapes(params).parameters == EXPECTED["Llama-3.1-8B"][0]


# An independent computation: GPU and host GB of a rank with actor, critic and reference under ZeRO 3 and
# feed-forward tiles of 8,192 tokens, for tokens, ranks, sequence parallelism, and offloads of activations (a)
# and optimizer (o). It took buckets of 2e8 gradients and 1.6 GB for the logits; the trainer takes buckets of
# 5e8 and 1.07 GB. It tiled experts too, which the trainer does not, so of the mixture only those cells are
# here in which a rank has few tokens. It did not count what norms keep, which the test subtracts.
TABLE = [
    ("Qwen3-8B", 32768, 8, 1, "", 60, 0),
    ("Qwen3-8B", 32768, 16, 1, "", 41, 0),
    ("Qwen3-8B", 32768, 64, 1, "", 26, 0),
    ("Qwen3-8B", 131072, 8, 4, "", 60, 0),
    ("Qwen3-8B", 131072, 8, 1, "a", 59, 39),
    ("Qwen3-8B", 131072, 16, 1, "", 78, 0),
    ("Qwen3-8B", 131072, 16, 4, "", 41, 0),
    ("Qwen3-8B", 131072, 64, 1, "", 63, 0),
    ("Qwen3-8B", 131072, 64, 4, "", 26, 0),
    ("Qwen3-32B", 32768, 8, 1, "ao", 42, 153),
    ("Qwen3-32B", 32768, 16, 1, "ao", 30, 87),
    ("Qwen3-32B", 32768, 64, 1, "", 59, 0),
    ("Qwen3-32B", 131072, 8, 8, "ao", 40, 142),
    ("Qwen3-32B", 131072, 16, 8, "ao", 28, 76),
    ("Qwen3-32B", 131072, 64, 4, "", 59, 0),
    ("Qwen3-32B", 131072, 64, 8, "", 46, 0),
    ("Qwen3-32B", 131072, 64, 1, "a", 50, 86),
    ("Qwen3-30B-A3B", 32768, 16, 4, "", 87, 0),
    ("Qwen3-30B-A3B", 131072, 16, 8, "", 89, 0),
]


def three_roles(
    name: str, tokens: int, ranks: int, parallel: int, offloads: str, **settings: Any
) -> RankMemory:
    engine = resolve("h20-pool").params.engine.model_copy(
        update={
            "mlp_tokens": 8192,
            "sequence_parallel": parallel,
            "activation_offload": "a" in offloads,
            "cpu_offload": "o" in offloads,
            **settings,
        }
    )
    shapes = public_shapes(name)
    return rank_memory(shapes, engine, Roles(True, True), ranks=ranks, tokens=tokens, row=tokens)


@pytest.mark.parametrize(("name", "tokens", "ranks", "parallel", "offloads", "gpu", "host"), TABLE)
def test_memory_is_that_of_an_independent_table(
    name: str, tokens: int, ranks: int, parallel: int, offloads: str, gpu: float, host: float
) -> None:
    found, shapes = three_roles(name, tokens, ranks, parallel, offloads), public_shapes(name)
    normalised = 2 * shapes.hidden + (shapes.heads + shapes.kv_heads) * shapes.head_dim
    found = replace(found, layer=found.layer - 6 * tokens / parallel * normalised)
    assert found.total / 1e9 == pytest.approx(gpu, rel=0.06), "the table's own rounding is 2 %"
    assert found.host / 1e9 == pytest.approx(host, abs=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_layer_keeps_most_of_its_planned_memory_for_the_backward_pass(kind: str, dtype: str) -> None:
    """The rest of the planned memory is for gradients of the hidden states, queries and keys."""
    tokens, config = 512, TINY | {"model_type": kind, "hidden_size": 256, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(
        config_of(config), dtype=DTYPES[dtype], attn_implementation=document_attention.SDPA
    )
    engine = resolve("h20-pool", (f"engine.dtype={dtype}", "engine.mlp_tokens=64")).params.engine
    engine = engine.model_copy(update={"sequence_parallel": 1})
    tile_mlps(model, engine.model_copy(update={"zero_stage": 0}))
    shapes = shapes_of(model.config, kind)
    planned = rank_memory(shapes, engine, Roles(False, False), ranks=1, tokens=tokens, row=tokens).layer
    assert 0.6 * planned < sum(kept_sizes(model, tokens)) < 0.8 * planned


@pytest.mark.parametrize(
    ("name", "tokens", "ranks", "parallel"),
    [
        ("Qwen3-8B", 32768, 8, 1),
        ("Qwen3-8B", 131072, 8, 4),
        ("Qwen3-8B", 131072, 16, 1),
        ("Qwen3-8B", 131072, 64, 1),
        ("Qwen3-32B", 32768, 64, 1),
        ("Qwen3-32B", 131072, 64, 4),
        ("Qwen3-30B-A3B", 32768, 16, 4),
        ("Qwen3-30B-A3B", 131072, 64, 4),
    ],
)
def test_the_smallest_degree_that_fits_90_gb_without_offload_is_that_of_the_table(
    name: str, tokens: int, ranks: int, parallel: int
) -> None:
    # The table compared the degrees 1, 4 and 8.
    fitting = [degree for degree in (1, 4, 8) if three_roles(name, tokens, ranks, degree, "").total <= 90e9]
    assert fitting[0] == parallel


@pytest.mark.parametrize(("tokens", "ranks"), [(32768, 8), (131072, 8), (131072, 16), (32768, 16)])
def test_a_32b_on_few_gpus_fits_with_offloads_only(tokens: int, ranks: int) -> None:
    assert all(three_roles("Qwen3-32B", tokens, ranks, degree, "a").total > 72e9 for degree in (1, 2, 4, 8))
    assert three_roles("Qwen3-32B", tokens, ranks, 8, "ao").total < 45e9


def test_limits_of_the_trainer_are_those_of_the_plan() -> None:
    assert output_head.LOGITS_BYTES == memory_model.LOGITS_BYTES
    assert checkpoint.BUCKET_BYTES == role_memory.BUCKET_BYTES
    bucket = inspect.signature(deepspeed_config).parameters["bucket"].default
    assert bucket == memory_model.REDUCE_BUCKET
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert DeepSpeedZeroConfig().sub_group_size == memory_model.SUB_GROUP


def test_each_change_moves_the_part_that_it_is_about() -> None:
    base = three_roles("Qwen3-8B", 131072, 8, 4, "")
    offloaded = three_roles("Qwen3-8B", 131072, 8, 4, "a")
    assert base.checkpoints == offloaded.host > 0 == offloaded.checkpoints
    optimizer = three_roles("Qwen3-8B", 131072, 8, 4, "o")
    assert base.states - optimizer.states == pytest.approx(optimizer.host)
    reference = three_roles("Qwen3-8B", 131072, 8, 4, "", reference_offload=True)
    assert base.reference == reference.host > 0 == reference.reference
    whole = three_roles("Qwen3-8B", 131072, 8, 4, "", activation_checkpointing=False)
    assert whole.checkpoints > 10 * base.checkpoints
    untiled = three_roles("Qwen3-8B", 131072, 8, 4, "", mlp_tokens=0)
    assert untiled.layer - base.layer == 12 * 12288 * (32768 - 8192)
    single = three_roles("Qwen3-8B", 131072, 1, 1, "")
    assert single.gathered == 0, "a single rank gathers nothing"
    # Eager attention is quadratic, and no other.
    assert three_roles("gpt-oss-20b", 131072, 64, 1, "").layer > 8 * 64 * 131072**2
