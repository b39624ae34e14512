"""The load of the experts of a mixture of experts."""

from collections import Counter

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from components.training.expert_load import ExpertLoad
from components.training.ranks import World

ALONE = World(0, 1, torch.device("cpu"))


def moe() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            moe_intermediate_size=16,
            num_experts=8,
            num_experts_per_tok=2,
        )
    ).eval()


def test_the_load_is_that_of_the_router_s_own_probabilities() -> None:
    model, ids = moe(), torch.arange(50)[None]
    load = ExpertLoad(model)
    with torch.no_grad():
        model(ids)  # not counted
        with load.counting():
            logits = model(ids, output_router_logits=True).router_logits
    busiest, used = [], 0
    for layer in logits:
        counts = Counter(layer.topk(2, dim=-1).indices.flatten().tolist())
        busiest.append(max(counts.values()) / (2 * 50 / 8))
        used += len(counts)
    figures = load.figures(ALONE)
    torch.testing.assert_close(figures["expert_load"], sum(busiest) / 2)
    torch.testing.assert_close(figures["experts_unused"], 1 - used / 16)


def test_a_router_that_always_takes_the_same_experts_is_seen() -> None:
    model = moe()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.mlp.gate.weight)  # equal scores: always the first two of eight
    load = ExpertLoad(model)
    with torch.no_grad(), load.counting():
        model(torch.arange(50)[None])
    assert load.figures(ALONE) == {"expert_load": 4.0, "experts_unused": 0.75}


def test_a_dense_model_has_no_figures() -> None:
    assert ExpertLoad(torch.nn.Linear(2, 2)).figures(ALONE) == {}
