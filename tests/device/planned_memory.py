"""Compare the planned memory of a single rank with what an update takes on this GPU.

    python tests/device/planned_memory.py [--profile hf-adapter] [--model Qwen3-8B] [--layers 0] \
        [--set KEY=VALUE]

The networks that the profile trains are made with random weights in the shapes of a public model, with
`--layers` of its layers (0: all, which full training needs many GPUs for), and take two steps of two
micro-batches, each a single row as long as the context, of which two fifths are own tokens. There is no
reference, no sampler and no judge. Prints one JSON object of GB: what was allocated at most (`allocated`),
what the driver reports with context and fragments (`used`), and the same of the plan. Ends with 1 if `used`
differs from the plan by more than 15 %. On cpu nothing is measured.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import numpy as np
import torch
from public_models import CONFIGURATIONS
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from components.core.config import resolve
from components.core.params import Params
from components.planning.memory_model import rank_memory, roles_of
from components.planning.model_shapes import shapes_of
from components.policy.adapter import add_adapter
from components.training import document_attention
from components.training.batches import Microbatch, make_batch, pack
from components.training.deepspeed_config import sharded_loading
from components.training.engine import DTYPES, DeepSpeedEngine
from components.training.networks import Actor, Critic, tile_mlps


def network(factory: Any, config: dict[str, Any], params: Params) -> PreTrainedModel:
    """Make a model with random weights in the way in which a stage loads one."""
    settings = AutoConfig.for_model(**config)
    with sharded_loading(params.engine, params.device), torch.device(params.device):
        model: PreTrainedModel = factory.from_config(
            settings, dtype=DTYPES[params.engine.dtype], attn_implementation=document_attention.SDPA
        )
    add_adapter(model, params.policy.adapter)
    if params.engine.mlp_tokens:
        tile_mlps(model, params.engine)
    return model


def measured(config: dict[str, Any], params: Params, has_critic: bool, tokens: int) -> dict[str, float]:
    """Train all networks for two steps, and return bytes and seconds."""
    cuda = params.device == "cuda"

    def engine(module: nn.Module) -> DeepSpeedEngine:
        return DeepSpeedEngine(module, params.engine, device=params.device, gradient_clip=1.0)

    engines = [engine(Actor(network(AutoModelForCausalLM, config, params), 1.0))]
    if has_critic:
        backbone = network(AutoModel, config, params)
        engines.append(engine(Critic(backbone, config["hidden_size"], DTYPES[params.engine.dtype])))
    resident = torch.cuda.memory_allocated() if cuda else 0

    ids = np.random.default_rng(0).integers(0, config["vocab_size"], tokens)
    mask = (np.arange(tokens) % 500 >= 300).astype(np.uint8)
    batch = make_batch([(ids, mask)])

    def loss(module: nn.Module, microbatch: Microbatch) -> Tensor:
        outputs = module(pack(batch, microbatch.rows, device=engines[0].world.device))
        total: Tensor = outputs[0].float().sum() / batch.tokens
        return total

    for _ in range(2):
        started = time.monotonic()
        for one in engines:
            one.step([Microbatch((0,))] * 2, loss, learning_rate=1e-6)
        if cuda:
            torch.cuda.synchronize()
        seconds = time.monotonic() - started
    free, total = torch.cuda.mem_get_info() if cuda else (0, 0)
    return {
        "resident": resident,
        "allocated": torch.cuda.max_memory_allocated() if cuda else 0,
        "used": total - free,
        "seconds": seconds,
    }


# Largest difference between measured and planned memory, as a share of the planned.
TOLERANCE = 0.15


def main() -> int:
    """Print the comparison, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="hf-adapter")
    parser.add_argument("--model", default="Qwen3-8B", choices=CONFIGURATIONS)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    options = parser.parse_args()
    params = resolve(options.profile, tuple(options.sets)).params
    config = dict(CONFIGURATIONS[options.model])
    config["num_hidden_layers"] = options.layers or config["num_hidden_layers"]
    shapes = shapes_of(AutoConfig.for_model(**config), options.model)
    roles, tokens = roles_of(params, shapes), params.policy.context
    roles = replace(roles, has_reference=False)
    planned = rank_memory(shapes, params.engine, roles, ranks=1, tokens=tokens, row=tokens)
    found = measured(config, params, roles.has_critic, tokens)
    seconds = found.pop("seconds")
    plan = {
        "resident": planned.states,
        "allocated": planned.total - planned.context,
        "used": planned.total,
        "layer": planned.layer,
        "checkpoints": planned.checkpoints,
        "logits": planned.logits,
    }
    print(
        json.dumps(
            {
                "device": torch.cuda.get_device_name() if params.device == "cuda" else "cpu",
                "model": options.model,
                "layers": config["num_hidden_layers"],
                "tokens": tokens,
                "measured_gb": {name: round(value / 1e9, 2) for name, value in found.items()},
                "planned_gb": {name: round(value / 1e9, 2) for name, value in plan.items()},
                "seconds_per_step": round(seconds, 2),
            }
        )
    )
    return int(params.device == "cuda" and abs(found["used"] / plan["used"] - 1) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
