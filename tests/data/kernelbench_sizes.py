"""Write the sizes of KernelBench's tasks to kernelbench_sizes.json, without computing at full size.

    python tests/data/kernelbench_sizes.py CHECKOUT [--output FILE]

CHECKOUT is a git checkout of https://github.com/ScalingIntelligence/KernelBench. Its programs run with fake
tensors, which have shapes and dtypes but no memory. The file has the sizes of each task: shapes and dtypes of
the inputs and outputs, bytes and number of tensors of the state dict, the number of parameters, and the
largest number of bytes of all tensors that exist at one time during a call, in the task's own dtypes and in
float64. These two peaks include inputs, state and outputs, but no workspace inside an operator. They are the
peaks on cpu, except that float64 attention is computed by separate operators, as on cuda. Takes about four
minutes on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import types
import weakref
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "components" / "sandbox" / "inside"))

import torch
import transformers
from operator_modes import computing_in_float64
from runner_support import flatten_outputs
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REPOSITORY = "https://github.com/ScalingIntelligence/KernelBench"
LEVELS = (1, 2, 3, 4)

# Configurations of level 4's models, by name in the Hugging Face Hub; arguments are given where the public
# configuration differs from the defaults of transformers. Weights are float32, as transformers 4 loads them.
CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    "EleutherAI/gpt-neo-2.7B": transformers.GPTNeoConfig(
        hidden_size=2560, num_layers=32, num_heads=20, attention_types=[[["global", "local"], 16]]
    ),
    "facebook/bart-large": transformers.BartConfig(),
    "facebook/opt-1.3b": transformers.OPTConfig(
        hidden_size=2048,
        num_hidden_layers=24,
        ffn_dim=8192,
        num_attention_heads=32,
        word_embed_proj_dim=2048,
    ),
    "google/bigbird-roberta-base": transformers.BigBirdConfig(),
    "google/electra-small-discriminator": transformers.ElectraConfig(),
    "google/reformer-enwik8": transformers.ReformerConfig(
        attention_head_size=128,
        attn_layers=["local", "local", "lsh", "local"] * 3,
        axial_pos_embds_dim=[256, 768],
        axial_pos_shape=[128, 512],
        feed_forward_size=4096,
        hidden_size=1024,
        is_decoder=True,
        local_attn_chunk_length=128,
        lsh_attn_chunk_length=256,
        max_position_embeddings=65536,
        num_attention_heads=8,
        num_buckets=512,
        num_hashes=4,
        vocab_size=258,
    ),
    "gpt2": transformers.GPT2Config(),
}


class PeakBytes(TorchDispatchMode):
    """Mode that measures the bytes of the tensors that are alive; each storage counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except DataDependentOutputException:  # the value of a fake tensor, for example a dropout rate
            return 0
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self.known:
            return
        self.known.add(id(storage))
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.remove, id(storage), storage.nbytes())

    def remove(self, identity: int, size: int) -> None:
        self.known.remove(identity)
        self.live -= size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "-C", str(options.checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    transformers.AutoConfig.from_pretrained = CONFIGS.__getitem__
    transformers.AutoModelForCausalLM.from_pretrained = lambda name, config: (
        transformers.AutoModelForCausalLM.from_config(config)
    )
    tasks = []
    for level in LEVELS:
        folder = options.checkout / "KernelBench" / f"level{level}"
        for path in sorted(folder.glob("*.py"), key=lambda path: int(path.stem.split("_")[0])):
            problem, name = path.stem.split("_", 1)
            tasks.append({"level": level, "problem": int(problem), "name": name} | measured(path.read_text()))
            print(f"level {level} problem {problem}: {tasks[-1]['peak_bytes'] / 1e9:.3f} GB", flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    source = {"repository": REPOSITORY, "commit": commit} | versions
    lines = ",\n".join(json.dumps(task, separators=(",", ":")) for task in tasks)
    options.output.write_text(f'{{"source":{json.dumps(source)},\n"tasks":[\n{lines}\n]}}\n')


def measured(code: str) -> dict[str, Any]:
    """Return the sizes of the task with the source `code`, by the names of their fields in the file."""
    model, inputs, outputs, peak_bytes = called(code, contextlib.nullcontext())
    sizes = {
        "inputs": [form(value) if isinstance(value, torch.Tensor) else value for value in inputs],
        "outputs": [form(tensor) for tensor in outputs],
        "state_bytes": sum(tensor.nbytes for tensor in model.state_dict().values()),
        "state_tensors": len(model.state_dict()),
        "parameters": len(list(model.named_parameters())),
        "peak_bytes": peak_bytes,
    }
    torch.set_default_dtype(torch.float64)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            return sizes | {"float64_peak_bytes": called(code, computing_in_float64())[-1]}
    finally:
        torch.set_default_dtype(torch.float32)


def called(
    code: str, precision: contextlib.AbstractContextManager[None]
) -> tuple[torch.nn.Module, list[Any], list[torch.Tensor], int]:
    """Call the task's model, and return model, inputs, outputs and the peak of the call in bytes."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), PeakBytes() as memory:
        module = types.ModuleType("model")
        exec(code, module.__dict__)
        model = module.Model(*module.get_init_inputs()).eval().requires_grad_(False)
        inputs = module.get_inputs()
        model(*inputs)  # some models build a part of themselves in the first call
        memory.peak = memory.live
        with precision:
            outputs = flatten_outputs(model(*inputs))
        return model, inputs, outputs, memory.peak


def form(tensor: torch.Tensor) -> tuple[list[int], str]:
    """Return the shape and the dtype of a tensor."""
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
