"""Tokens per second and memory of a PPO update of the actor, beside TRL's update in the same run.

    python tests/bench/bench_update.py [--model smoke] [--profile smoke] [--device cpu] [--rows 96] \
        [--longest 512] [--repeats 3] [--against trl] [--set KEY=VALUE]
    torchrun --nproc-per-node N tests/bench/bench_update.py ...

Both start from the same random weights in a folder and train on the same rows of uneven length, prompts,
turns and observations, in the same number of optimizer steps. A third of the tokens are the policy's own.

- This project: update_actor under DeepSpeed with the engine's settings (`--set engine.KEY=VALUE`).
- `--against trl`: TRL's GRPOTrainer, which is not a dependency of the project. Its `train` runs with its own
  loss, log-probabilities, gradient accumulation and optimizer; instead of generating, it is given the rows.
  As in TRL, prompts are padded on the left and completions on the right, to the longest of all rows of the
  rank, and observations are masked with `tool_mask`. As many rows are in a micro-batch as padded rows fit
  into engine.tokens_per_microbatch. Weights are in float32, computed in the engine's precision by autocast,
  TRL's default. Several ranks are data parallel.
- `--against plain`, or if TRL cannot be imported: a loop over padded rows with the logits of every position
  and torch's AdamW.

Counted are tokens that are no padding. Seconds are CPU seconds of one thread for one rank on cpu (wall time
on a shared machine says little), and wall time otherwise. Memory is the largest use of a rank's GPU in the
updates by torch's allocator. Each way's first update warms up and is not counted. Printed is also the loss
of this first update, which differs between the ways only by rounding if there is one minibatch. With one
rank, an alternative that runs out of GPU memory is reported as not fitting, and this project is measured.
"""

import argparse
import functools
import gc
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

# TRL's modules ask a server at start unless they are told to be offline.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import torch
from actor_updates import LEARNING_RATE, Measured, grpo_trainer, ours, plain, rank, ranks
from public_models import SHAPES, configuration, peak_flops, training_flops
from torch import distributed
from transformers import AutoModelForCausalLM, Qwen3Config

from components.bootstrap.cold_start import new_model
from components.core.config import resolve
from components.core.params import Params
from components.training.batches import Rollout, make_batch
from components.training.engine import DTYPES
from components.training.ppo import Experience


def make_rows(vocabulary: int, rows: int, longest: int) -> tuple[Rollout, Experience]:
    """Draw turns and observations; lengths from a tenth of `longest` to `longest`, short ones more often."""
    source = random.Random(0)
    examples = []
    for _ in range(rows):
        length = int(longest * (0.1 + 0.9 * source.random() ** 2))
        mask = [0] * (length // 3)
        while len(mask) < length:
            mask += [1] * source.randint(20, 60) + [0] * source.randint(40, 120)
        examples.append(([source.randrange(3, vocabulary) for _ in range(length)], mask[:length]))
    batch = make_batch(examples)
    noise = torch.Generator().manual_seed(0)
    # About the log-probability of every token for random weights, so that few ratios are clipped.
    logprob = -torch.tensor(float(vocabulary)).log() + 0.1 * torch.randn(batch.tokens, generator=noise)
    zeros = torch.zeros(batch.tokens)
    experience = Experience(
        old_logprob=logprob,
        reference_logprob=zeros,
        advantages=torch.randn(batch.tokens, generator=noise),
        returns=zeros,
        importance=torch.ones(batch.tokens),
    )
    return Rollout(**vars(batch), sampler_logprob=logprob, rewards=torch.zeros(rows)), experience


def shared_folder() -> Path:
    """Return a new folder that all ranks know."""
    names = [tempfile.mkdtemp(prefix="bench-update-") if rank() == 0 else ""]
    if ranks() > 1:
        distributed.broadcast_object_list(names)
    return Path(names[0])


def save_model(params: Params, name: str, folder: Path) -> Qwen3Config:
    """Write random weights of a public model, or of the profile's policy, and return the configuration."""
    smoke = new_model(params, params.policy.vocabulary) if name == "smoke" else None
    config = smoke.config if smoke else configuration(name)
    if rank() == 0:
        torch.manual_seed(0)
        with torch.device(params.device):
            model = smoke or AutoModelForCausalLM.from_config(config, dtype=DTYPES[params.engine.dtype])
        model.save_pretrained(folder)
    if ranks() > 1:
        distributed.barrier()
    return config


def alternative(name: str) -> tuple[str, Callable[..., Measured]]:
    """Return name and function of what this project is compared with."""
    if name == "trl":
        try:
            import trl

            assert trl.GRPOTrainer  # imported only now
            return f"TRL {trl.__version__}, GRPOTrainer", grpo_trainer
        except ImportError as error:
            if rank() == 0:
                print(f"TRL cannot be imported, so this compares with a plain loop: {error}", flush=True)
    return "plain loop over padded rows", plain


def measure_or_none(measure: Callable[[], Measured]) -> Measured | None:
    """Return what `measure` returns, or None if it runs out of GPU memory."""
    try:
        return measure()
    except torch.OutOfMemoryError as error:
        print(error, file=sys.stderr, flush=True)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smoke", choices=["smoke", *SHAPES])
    parser.add_argument("--profile", default="smoke")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", default="trl", choices=["trl", "plain", "nothing"])
    parser.add_argument("--set", dest="sets", action="append", default=[])
    options = parser.parse_args()
    params = resolve(options.profile, (f"device={options.device}", *options.sets)).params
    one_pass = {"epochs": 1, "learning_rate": LEARNING_RATE, "learning_rate_warmup_steps": 0}
    params = params.model_copy(update={"agentic": params.agentic.model_copy(update=one_pass)})
    if options.rows % (params.agentic.minibatches * ranks()):
        parser.error(
            f"--rows must be a multiple of {params.agentic.minibatches} minibatches x {ranks()} ranks"
        )
    if options.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if ranks() > 1:
        distributed.init_process_group("gloo" if options.device == "cpu" else "nccl")
    name, other = alternative(options.against)
    if ranks() > 1 and other is plain and options.against != "nothing":
        parser.error("the plain loop has one rank; take --against nothing")
    folder = shared_folder()
    try:
        config = save_model(params, options.model, folder)
        batch, experience = make_rows(config.vocab_size, options.rows, options.longest)
        # The other way goes first: this project's engine makes a process group, which TRL would take for a
        # launch with several ranks.
        ways: dict[str, Callable[..., Measured]] = {} if options.against == "nothing" else {name: other}
        ways["this project"] = ours
        found: dict[str, Measured | None] = {}
        for way, measure in ways.items():
            # What a way holds that ran out of memory is freed here, since its error is gone.
            gc.collect()
            before = 0
            if options.device == "cuda":
                torch.cuda.empty_cache()
                before = torch.cuda.memory_allocated()
            update = functools.partial(measure, params, folder, batch, experience, options.repeats)
            # If one of several ranks ran out of memory and went on, the others would wait for it.
            may_fail = measure is not ours and ranks() == 1
            measured = measure_or_none(update) if may_fail else update()
            found[way] = measured
            if measured:
                measured.peak -= before
    finally:
        if ranks() > 1:
            distributed.barrier()
        if rank() == 0:
            shutil.rmtree(folder)
    report(params, config, batch, found)
    sys.stdout.flush()
    sys.stderr.flush()
    # ZeRO 3 sometimes aborts when the interpreter ends ("terminate called without an active exception").
    os._exit(0)


def report(params: Params, config: Qwen3Config, batch: Rollout, found: dict[str, Measured | None]) -> None:
    """Print a line for each way; None stands for a way that does not fit into the GPU's memory."""
    device = torch.device(params.device if params.device == "cpu" else "cuda")
    for measured in filter(None, found.values()):
        largest = torch.tensor([measured.peak, *measured.seconds], dtype=torch.float64).to(device)
        if ranks() > 1:
            distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        measured.peak, *measured.seconds = largest.tolist()
    if rank():
        return
    tokens, is_frozen = sum(batch.lengths), params.policy.adapter.rank > 0
    flops, with_attention = training_flops(config, batch.lengths, batch.tokens, is_frozen)
    peak = peak_flops() if params.device == "cuda" else None
    print(
        f"{len(batch.lengths)} rows, {tokens} tokens, {batch.tokens} own, longest {max(batch.lengths)}; "
        f"{ranks()} rank{'s' * (ranks() > 1)}, {params.engine.dtype}, "
        f"{torch.cuda.get_device_name() if params.device == 'cuda' else 'cpu'}"
    )
    seconds = {name: statistics.median(measured.seconds) for name, measured in found.items() if measured}
    for name, measured in found.items():
        if measured is None:
            print(f"{name:28} does not fit into {torch.cuda.mem_get_info()[1] / 1e9:.0f} GB")
            continue
        line = f"{name:28} {tokens / seconds[name]:10.0f} tokens/s  loss {measured.loss:9.6f}"
        if params.device == "cuda":
            line += f"  peak {measured.peak / 1e9:6.1f} GB"
        if peak:
            shares = [100 * count / seconds[name] / peak / ranks() for count in (flops, with_attention)]
            line += f"  {shares[0]:4.1f} % of the peak by {4 if is_frozen else 6}N"
            line += f" ({shares[1]:4.1f} % with attention)"
        ratio = seconds[name] / seconds["this project"]
        print(line + ("" if name == "this project" else f"  this project is {ratio:5.2f} times as fast"))
    if peak:
        print(
            f"{4 if is_frozen else 6}N counts each parameter of the layers for each token, and each of the "
            "output head for each own token; no padding, no recomputed activations"
        )


if __name__ == "__main__":
    main()
