"""Tokens per second of a PPO update of the actor against a plain loop, in one run.

    python tests/bench/bench_update.py [--profile smoke] [--device cpu] [--rows 96] \
        [--longest 512] [--repeats 3] [--set KEY=VALUE]

The plain loop is how TRL's PPO trainer goes through a batch: rows in the given order, a fixed number of
them in each micro-batch, padded to the longest of all, logits of every position over the whole vocabulary,
torch's AdamW. Ours packs micro-batches by tokens and computes logits of the policy's own tokens alone,
under DeepSpeed. Rows are prompts, turns and observations of uneven length, a third of the tokens the
policy's own. Counted are tokens that are no padding, by CPU seconds of one thread on cpu (wall time on a
shared machine says little) and by wall time on cuda.
"""

import argparse
import copy
import random
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from components.bootstrap.cold_start import new_model
from components.core.config import resolve
from components.core.params import Params
from components.training.batches import pad
from components.training.engine import BETAS, DTYPES, DeepSpeedEngine
from components.training.losses import policy_loss_sum
from components.training.networks import Actor
from components.training.ppo import Experience, update_actor


def experience(params: Params, rows: int, longest: int) -> Experience:
    """Draw turns and observations; lengths from a tenth of `longest` to `longest`, short ones more often."""
    source = random.Random(0)
    examples = []
    for _ in range(rows):
        length = int(longest * (0.1 + 0.9 * source.random() ** 2))
        mask = [0] * (length // 3)
        while len(mask) < length:
            mask += [1] * source.randint(20, 60) + [0] * source.randint(40, 120)
        examples.append(
            ([source.randrange(3, params.policy.vocabulary) for _ in range(length)], mask[:length])
        )
    batch = pad(examples)
    noise = torch.Generator().manual_seed(0)
    numbers = [torch.randn(batch.ids.shape, generator=noise) for _ in range(2)]
    logprob = -8.0 + 0.1 * numbers[0]
    zeros = torch.zeros(batch.ids.shape)
    return Experience(
        **vars(batch),
        sampler_logprob=logprob,
        rewards=zeros,
        old_logprob=logprob,
        reference_logprob=logprob,
        old_values=zeros,
        advantages=numbers[1],
        returns=zeros,
        importance=torch.ones(batch.ids.shape),
        best=torch.zeros_like(batch.action_mask),
    )


def plain(params: Params, model: torch.nn.Module, data: Experience, per_device: int) -> Callable[[], None]:
    """One update by the plain loop; the optimizer lives across calls."""
    ppo, device = params.agentic, torch.device("cpu" if params.device == "cpu" else "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=BETAS, weight_decay=0.0)

    def update() -> None:
        model.train()
        order = list(range(len(data.ids)))
        for part in range(ppo.minibatches):
            rows = order[part :: ppo.minibatches]
            tokens = data.action_mask[rows].sum()
            optimizer.zero_grad()
            for first in range(0, len(rows), per_device):
                some = rows[first : first + per_device]
                ids, mask, old, advantages = (
                    x[some].to(device)
                    for x in (data.ids, data.action_mask, data.old_logprob, data.advantages)
                )
                logits: Tensor = model(input_ids=ids, use_cache=False).logits
                logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
                logprob = torch.nn.functional.pad(logprobs.gather(-1, ids[:, 1:, None])[..., 0], (1, 0))
                loss, _ = policy_loss_sum(logprob, old, advantages, mask, ppo.clip_low, ppo.clip_high)
                (loss / tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), ppo.gradient_clip)
            optimizer.step()

    return update


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    params = resolve(options.profile, (f"device={options.device}", *options.sets)).params
    data = experience(params, options.rows, options.longest)
    model = new_model(params, params.policy.vocabulary)
    torch.nn.Module.to(model, options.device, DTYPES[params.engine.dtype])
    per_device = max(1, params.engine.tokens_per_microbatch // int(data.ids.shape[1]))
    other = plain(params, copy.deepcopy(model), data, per_device)
    engine = DeepSpeedEngine(
        Actor(model, 1.0), params.engine, device=params.device, gradient_clip=params.agentic.gradient_clip
    )
    ppo = params.agentic.model_copy(update={"epochs": 1, "learning_rate": 1e-6})
    ways: dict[str, Callable[[], object]] = {
        f"plain loop, {per_device} rows each": other,
        "this project": lambda: update_actor(data, engine, ppo, 0, 100),
    }

    def clock() -> float:
        if options.device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    tokens, seconds = int(data.valid.sum()), {name: [] for name in ways}
    for repeat in range(options.repeats + 1):
        for name, way in ways.items():
            started = clock()
            way()
            if repeat:  # the first one warms up
                seconds[name].append(clock() - started)
    rates = {name: tokens / sorted(found)[len(found) // 2] for name, found in seconds.items()}
    sys.stderr.flush()
    for name, rate in rates.items():
        print(
            f"{name:28} {rate:10.0f} tokens/s   this project is {rates['this project'] / rate:5.2f} times as"
            " fast",
            flush=True,
        )


if __name__ == "__main__":
    main()
