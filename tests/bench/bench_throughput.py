"""Tokens per second and share of the GPU's peak rate of updates of a small and a larger policy.

    python tests/bench/bench_throughput.py [--small] [--seconds 100] [--repeats 3] [--models NAME ...]

Llamas in the shapes of SmolLM2-135M and SmolLM2-1.7B with random weights in bfloat16 take a step of
supervised fine-tuning (one optimizer step) and an update of PPO's actor (two optimizer steps) on the same
rows of 300 to 1,200 tokens, of which the last 60 % are the policy's own. Each step is measured

- with the attention of all rows in one kernel (`kernel`),
- with attention row by row (`row loop`),
- with the kernel and compiled layers (`compiled`, engine.compile),
- with TRL's SFTTrainer on packed rows (`TRL`), fine-tuning only, if trl and datasets can be imported.

Prints a line for each measurement: tokens per second (all tokens of the rows, no padding), the share of the
peak rate by 6N (`public_models.training_flops`) and with the products of attention, the largest memory, and
the loss of the first step, which should be nearly the same in all of them, because they take turns in
training one network at a learning rate of 1e-6. At the end it prints how many times as fast as the row loop
and as TRL each of the others is. Seconds are wall time, the median of `--repeats` steps after one that is not
counted. This project's steps and TRL's run in two processes, one after the other. Where `--seconds` leaves no
time for a measurement, a line says so.

`--small` runs a tiny model on the cpu, where all rows are computed one after the other and nothing is
compiled: it shows that the script runs, and its figures mean nothing.
"""

import argparse
import contextlib
import gc
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# TRL's trainer would divide its batches among all GPUs that it sees.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import torch
from public_models import CONFIGURATIONS, SHAPES, peak_flops, random_network, training_flops
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from components.core.config import resolve
from components.core.params import Params
from components.training import document_attention
from components.training.batches import Batch, Streams, make_batch
from components.training.engine import DeepSpeedEngine, MetricSums, compile_network, train_step
from components.training.fine_tuning import likelihood_loss
from components.training.networks import Actor
from components.training.ppo import Experience, update_actor

LEARNING_RATE = 1e-6
LENGTHS, OWN_SHARE = (300, 1200), 0.6
KERNEL, ROW_LOOP, COMPILED, TRL = "kernel", "row loop", "compiled", "TRL"
FINE_TUNING, PPO = "fine-tuning", "PPO update"
# Seconds of the budget that are kept for TRL's process, and that compiling one model takes.
TRL_SECONDS, COMPILE_SECONDS = 30, 25


@dataclass(frozen=True)
class Load:
    """Rows of a step, and most tokens of a micro-batch that 80 GB hold."""

    rows: int
    tokens_per_microbatch: int


LOADS = {"SmolLM2-135M": Load(128, 32768), "SmolLM2-1.7B": Load(40, 8192), "tiny": Load(6, 2048)}


def configuration(name: str) -> LlamaConfig:
    fields = CONFIGURATIONS.get(name) or SHAPES[name]
    return LlamaConfig(**{**fields, "use_cache": False})


def rows_of(name: str) -> Batch:
    """Draw the rows of a step."""
    source, vocabulary, rows = random.Random(0), configuration(name).vocab_size, []
    for _ in range(LOADS[name].rows):
        length = source.randint(*LENGTHS)
        own = round(OWN_SHARE * length)
        ids = [source.randrange(3, vocabulary) for _ in range(length)]
        rows.append((ids, [0] * (length - own) + [1] * own))
    return make_batch(rows)


def experience_of(batch: Batch, vocabulary: int) -> Experience:
    """Draw advantages, and log-probabilities close to those of random weights: few ratios are clipped."""
    noise, zeros = torch.Generator().manual_seed(0), torch.zeros(batch.tokens)
    return Experience(
        old_logprob=0.1 * torch.randn(batch.tokens, generator=noise) - math.log(vocabulary),
        reference_logprob=zeros,
        advantages=torch.randn(batch.tokens, generator=noise),
        returns=zeros,
        importance=torch.ones(batch.tokens),
    )


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(step: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Return the median of the seconds of `step` after a first call, and what the first call returned."""
    loss, seconds = step(), []
    for _ in range(repeats):
        synchronize()
        begun = time.perf_counter()
        step()
        synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds), loss


def report(model: str, step: str, way: str, seconds: float, loss: float) -> None:
    """Print a measurement for people, and then as a line of JSON for the process that started this one."""
    batch, gigabytes = rows_of(model), 0.0
    tokens, peak = sum(batch.lengths), peak_flops()
    line = f"{model:13} {step:11} {way:9} {tokens / seconds:9.0f} tokens/s {seconds:7.3f} s"
    if peak:
        flops = training_flops(configuration(model), list(batch.lengths), batch.tokens)
        shares = [100 * count / seconds / peak for count in flops]
        gigabytes = torch.cuda.max_memory_allocated() / 1e9
        line += (
            f"  {shares[0]:4.1f} % of the peak by 6N ({shares[1]:4.1f} % with attention) {gigabytes:5.1f} GB"
        )
    print(f"{line}  loss {loss:.4f}", flush=True)
    print(json.dumps({"model": model, "step": step, "way": way, "seconds": seconds}), flush=True)


@contextlib.contextmanager
def row_loop() -> Iterator[None]:
    """Return a context in which attention is computed row by row on every device."""
    has_varlen = document_attention.has_varlen
    document_attention.has_varlen = lambda *_: False
    try:
        yield
    finally:
        document_attention.has_varlen = has_varlen


def params_of(model: str, device: str) -> Params:
    engine = {
        "zero_stage": 1,
        "dtype": "bfloat16",
        "tokens_per_microbatch": LOADS[model].tokens_per_microbatch,
        "activation_checkpointing": "false",
    }
    sets = (f"device={device}", *(f"engine.{name}={value}" for name, value in engine.items()))
    params = resolve("smoke", sets).params
    ppo = {"epochs": 1, "minibatches": 2, "learning_rate": LEARNING_RATE, "learning_rate_warmup_steps": 0}
    return params.model_copy(update={"agentic": params.agentic.model_copy(update=ppo)})


def measure_ours(models: list[str], device: str, repeats: int, end: float) -> None:
    """Measure this project's steps until `end`, a time of `time.time`."""
    for model in models:
        params, batch = params_of(model, device), rows_of(model)
        experience = experience_of(batch, configuration(model).vocab_size)
        network = Actor(random_network(AutoModelForCausalLM, configuration(model), params), 1.0)
        clip = params.agentic.gradient_clip
        engine = DeepSpeedEngine(network, params.engine, device=params.device, gradient_clip=clip)

        def fine_tune(engine: DeepSpeedEngine = engine, batch: Batch = batch) -> float:
            sums, rows = MetricSums(), range(len(batch.ids))
            train_step(engine, batch, Streams(), rows, likelihood_loss, sums, learning_rate=LEARNING_RATE)
            return sums.means(engine.world, batch.tokens)["loss"]

        def update(
            engine: DeepSpeedEngine = engine,
            batch: Batch = batch,
            experience: Experience = experience,
            params: Params = params,
        ) -> float:
            return update_actor(batch, experience, engine, params.agentic, 0, 100)["policy_loss"]

        for way in (KERNEL, ROW_LOOP, COMPILED):
            if way == COMPILED and (device == "cpu" or time.time() + COMPILE_SECONDS > end):
                print(f"{model:13} {way}: not measured, no GPU or no time left", flush=True)
                continue
            if way == COMPILED:
                compile_network(network)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with row_loop() if way == ROW_LOOP else contextlib.nullcontext():
                try:
                    report(model, FINE_TUNING, way, *timed(fine_tune, repeats))
                    report(model, PPO, way, *timed(update, repeats))
                except Exception as error:  # the other ways are measured all the same
                    print(f"{model:13} {way}: failed, {type(error).__name__}: {error}", flush=True)
        del engine, network, fine_tune, update
        gc.collect()
        torch.cuda.empty_cache()


def measure_trl(models: list[str], device: str, repeats: int) -> None:
    """Measure optimizer steps of TRL's SFTTrainer on all rows, packed."""
    from datasets import Dataset, disable_progress_bars
    from datasets.fingerprint import Hasher
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    # The rows are never cached, so fingerprints need no pickling, which some versions of pyarrow refuse.
    Hasher.hash = classmethod(lambda _, value: f"{id(value)}-{time.time_ns()}")
    # Without the package flash_attn, TRL's packed rows need a mask that is quadratic in the micro-batch.
    has_flash = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    for model in models:
        batch, seconds, losses = rows_of(model), [], []

        class Clock(TrainerCallback):
            begun = 0.0

            def on_step_begin(self, *_: Any, **__: Any) -> None:
                synchronize()
                self.begun = time.perf_counter()

            def on_step_end(self, *_: Any, seconds: list[float] = seconds, **__: Any) -> None:
                synchronize()
                seconds.append(time.perf_counter() - self.begun)

            def on_log(
                self, args: Any, state: Any, control: Any, logs: Any, losses: list[float] = losses, **_: Any
            ) -> None:
                losses.extend([logs["loss"]] if "loss" in logs else [])

        labels = [
            [int(token) if own else -100 for token, own in zip(ids, mask, strict=True)]
            for ids, mask in zip(batch.ids, batch.action_mask, strict=True)
        ]
        dataset = Dataset.from_dict({"input_ids": [ids.tolist() for ids in batch.ids], "labels": labels})
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
            pad_token="<pad>",
            eos_token="<eos>",
        )
        torch.manual_seed(0)
        attention = "flash_attention_2" if has_flash else "sdpa"
        with torch.device(device), tempfile.TemporaryDirectory() as out:
            # Weights in float32, computed in bfloat16 by autocast, as is TRL's default.
            network = AutoModelForCausalLM.from_config(configuration(model), attn_implementation=attention)
            options = SFTConfig(
                output_dir=out,
                use_cpu=device == "cpu",
                bf16=True,
                gradient_checkpointing=False,
                packing=True,
                max_length=4096,
                per_device_train_batch_size=LOADS[model].tokens_per_microbatch // 4096 if has_flash else 1,
                # More than there are sequences in a pass over the rows, so that a pass is one optimizer step.
                gradient_accumulation_steps=len(batch.ids),
                num_train_epochs=repeats + 1,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                max_grad_norm=1.0,
                disable_tqdm=True,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
            )
        # Outside of the context, which would make the loader's random generator on the device.
        trainer = SFTTrainer(
            network, args=options, train_dataset=dataset, processing_class=tokenizer, callbacks=[Clock()]
        )
        trainer.train()
        report(model, FINE_TUNING, TRL, statistics.median(seconds[1:]), losses[0])
        trainer.accelerator.free_memory()
        del trainer, network
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def run(part: str, options: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    """Measure in a process of its own for at most `seconds`, print its lines, and return its measurements."""
    command = [sys.executable, __file__, "--part", part, "--repeats", str(options.repeats)]
    command += ["--models", *options.models, "--end", str(time.time() + seconds)]
    found = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [*command, *["--small"] * options.small], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        timer = threading.Timer(max(1.0, seconds), process.kill)
        timer.start()
        for line in process.stdout:
            if line.startswith('{"model"'):
                found.append(json.loads(line))
            elif line.startswith(tuple(LOADS)):  # and nothing that a library prints
                print(line, end="", flush=True)
        code = process.wait()
        timer.cancel()
        if code:
            errors.seek(0)
            last = "".join(errors.readlines()[-8:])
            print(f"{part}: ended with {code} (-9: no time left)\n{last}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a tiny model on the cpu")
    parser.add_argument("--seconds", type=float, default=100, help="for everything together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=LOADS)
    parser.add_argument("--part", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.models = options.models or (["tiny"] if options.small else ["SmolLM2-135M", "SmolLM2-1.7B"])
    device = "cpu" if options.small else "cuda"
    if options.part == "ours":
        measure_ours(options.models, device, options.repeats, options.end)
        sys.stdout.flush()
        os._exit(0)
    if options.part == "trl":
        measure_trl(options.models, device, options.repeats)
        return
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU here; --small runs a tiny model on the cpu")
    begun = time.monotonic()
    has_trl = all(importlib.util.find_spec(name) for name in ("trl", "datasets"))
    print(
        f"{torch.cuda.get_device_name() if device == 'cuda' else 'cpu'}, torch {torch.__version__}",
        flush=True,
    )
    found = run("ours", options, options.seconds - TRL_SECONDS * has_trl)
    if has_trl:
        found += run("trl", options, options.seconds - (time.monotonic() - begun))
    else:
        print("TRL is not measured: trl or datasets cannot be imported")
    seconds = {(line["model"], line["step"], line["way"]): line["seconds"] for line in found}
    for (model, step, way), own in seconds.items():
        for other in (ROW_LOOP, TRL) if way in (KERNEL, COMPILED) else ():
            if (model, step, other) in seconds:
                ratio = seconds[model, step, other] / own
                print(f"{model:13} {step:11} {way:9} is {ratio:5.2f} times as fast as {other}")
    # Each model and step with the kernel is what the script is for.
    sys.exit(0 if all((model, PPO, KERNEL) in seconds for model in options.models) else 1)


if __name__ == "__main__":
    main()
