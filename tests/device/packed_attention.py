"""Compare the attention of packed rows in one kernel with attention row by row, in bfloat16 on this GPU.

    python tests/device/packed_attention.py [--skip-compiled]

Outputs and gradients of both are compared with those of the row loop in float32 on the same numbers: the
error of the kernel (norm of the difference over the norm) may be at most one and a half times that of the row
loop. So are log-probabilities and gradients of the parameters of a small Llama, also with recomputed
activations and with compiled layers. Prints a line for each case, with the milliseconds of a forward and a
backward pass, and ends with 1 if an error is larger, if the kernel is not used, or if layers are compiled
again for other numbers of rows.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import packed_attention_fixtures
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from components.training import document_attention
from components.training.batches import Packed, make_batch, pack
from components.training.document_attention import SDPA, VARLEN_ARGUMENTS
from components.training.engine import compile_network
from components.training.networks import Actor

DEVICE = "cuda"
LENGTHS = (700, 1, 333, 1200, 64, 15, 900)
# Query heads, key-value heads, head_dim and sliding window.
CASES = ((9, 3, 64, None), (9, 3, 64, 100), (32, 32, 64, None), (32, 8, 128, None), (16, 2, 128, 256))
# Largest error of the kernel in errors of the row loop, and what is no error at all.
FACTOR, NEGLIGIBLE = 1.5, 1e-3


def packed_rows(lengths: tuple[int, ...], vocabulary: int) -> Packed:
    draw = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths:
        length = max(2, length)  # the first token of a row is never the policy's own
        ids = torch.randint(vocabulary, (length,), generator=draw).tolist()
        rows.append((ids, [0] * (length // 3 or 1) + [1] * (length - (length // 3 or 1))))
    return pack(make_batch(rows), range(len(rows)), device=DEVICE)


def by_row(*_: Any) -> bool:
    """Take the place of `has_varlen`, so that every device computes row by row."""
    return False


def attention(case: tuple[int, int, int, int | None], dtype: torch.dtype) -> list[Tensor]:
    heads, kv_heads, head_dim, window = case
    return packed_attention_fixtures.attention(
        LENGTHS, (heads, kv_heads), head_dim, window, dtype=dtype, device=DEVICE
    )


def scores(actor: Actor, packed: Packed) -> list[Tensor]:
    """Return log-probabilities and the gradients of their mean by the parameters."""
    actor.zero_grad()
    logprob, _ = actor(packed)
    logprob.mean().backward()
    return [logprob.detach(), *(p.grad.clone() for p in actor.parameters() if p.grad is not None)]


def errors(found: list[Tensor], exact: list[Tensor]) -> tuple[float, float]:
    """Return the errors of the first tensor and of all others, which are gradients, together."""
    differences = [(one.float() - two.float()).norm() for one, two in zip(found, exact, strict=True)]
    norms = [two.float().norm() for two in exact]
    gradient = torch.stack(differences[1:]).norm() / torch.stack(norms[1:]).norm()
    return float(differences[0] / norms[0]), float(gradient)


def milliseconds(compute: Callable[[], object]) -> float:
    compute()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(5):
        compute()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / 5 * 1000


def compare(
    name: str, kernel: Callable[[], list[Tensor]], loop: Callable[[], list[Tensor]], exact: list[Tensor]
) -> bool:
    """Print the errors and times of `kernel` and of `loop`, and return whether the kernel is as good."""
    ours, took = errors(kernel(), exact), milliseconds(kernel)
    has_varlen = document_attention.has_varlen
    document_attention.has_varlen = by_row
    try:
        others, other_took = errors(loop(), exact), milliseconds(loop)
    finally:
        document_attention.has_varlen = has_varlen
    is_right = all(one <= FACTOR * two + NEGLIGIBLE for one, two in zip(ours, others, strict=True))
    print(
        f"{name:34} errors {ours[0]:.1e} {ours[1]:.1e}, row loop {others[0]:.1e} {others[1]:.1e}; "
        f"{took:7.2f} ms, row loop {other_took:7.2f} ms  {'OK' if is_right else 'FAIL'}",
        flush=True,
    )
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--skip-compiled", action="store_true")
    options = parser.parse_args()
    sample = torch.empty(1, 9, 8, 64, dtype=torch.bfloat16, device=DEVICE)
    print(f"torch {torch.__version__}, varlen_attn({', '.join(sorted(VARLEN_ARGUMENTS))})", flush=True)
    results = [document_attention.has_varlen(sample, sample, 0.125, None)]
    print(f"the kernel is used: {results[0]}", flush=True)
    for case in CASES:
        exact = attention(case, torch.float32)

        def compute(case: tuple[int, int, int, int | None] = case) -> list[Tensor]:
            return attention(case, torch.bfloat16)

        heads, kv_heads, head_dim, window = case
        name = f"{heads} heads, {kv_heads} kv, {head_dim}, window {window}"
        results.append(compare(name, compute, compute, exact))

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        policy = LlamaForCausalLM(config).bfloat16()
    policy.set_attn_implementation(SDPA)
    # As the engine does: a training step, with no dropout.
    actor, packed = Actor(policy, 0.8).train(), packed_rows(LENGTHS, config.vocab_size)
    exact = scores(copy.deepcopy(actor).float(), packed)

    def loop() -> list[Tensor]:
        return scores(actor, packed)

    results.append(compare("Llama, 4 layers", loop, loop, exact))
    recomputed = copy.deepcopy(actor)
    recomputed.policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    results.append(compare("the same, recomputed", lambda: scores(recomputed, packed), loop, exact))
    if not options.skip_compiled:
        compiled = copy.deepcopy(actor)
        compile_network(compiled)
        begun = time.perf_counter()
        scores(compiled, packed)
        print(f"compiled in {time.perf_counter() - begun:.0f} s", flush=True)
        results.append(compare("the same, compiled", lambda: scores(compiled, packed), loop, exact))
        graphs = counters["stats"]["unique_graphs"]
        for lengths in (LENGTHS[:3], LENGTHS * 2, (50, 60)):
            scores(compiled, packed_rows(lengths, config.vocab_size))
        again = counters["stats"]["unique_graphs"] - graphs
        print(f"graphs {graphs}, compiled again for other rows: {again}", flush=True)
        results.append(again == 0)
    print("OK" if all(results) else "FAIL")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
