"""One PPO update of long trajectories on the GPUs of this machine: memory, speed, and sequence parallelism.

    python tests/device/long_context.py [--model Qwen3-8B] [--device cuda] [--gpus N] \
        [--lengths 32768 131072] [--seconds 580] [--only NAME] [--out FOLDER] [--set KEY=VALUE]

Each case is a network of the model's public shape with random weights, trained by its own ranks: on one GPU
with adapters, on two and four all parameters under ZeRO 3 with and without sequence parallelism. A case makes
one update of the shortest length to warm up, then one of each length. There are as many trajectories as
ranks, each of that many tokens, a third of them the policy's own, in one optimizer step.

A line of the table is one update. `peak` is the largest use of a rank's GPU by torch's allocator, `used` what
the device reports as used after it (the caches of the allocator, the CUDA context and NCCL included),
`planned` the figure of components/planning for the same settings, and `pinned` the host memory of offloaded
activations. `share` is the share of the card's peak rate by the operations of the matrix products and the
causal attention, without recomputed ones. `loss` and `norm` are the update's loss and gradient norm, which
must agree between cases that differ only in how they divide the work; these are compared below the table.

Needs torch, DeepSpeed, transformers and this project, no pytest. Cases for more GPUs than there are, and
those for which no time is left, are listed as not run. Ends with 1 if a case fails or a comparison disagrees.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import numpy as np
import torch
from public_models import SHAPES, configuration, peak_flops, random_network, training_flops
from torch import distributed, nn
from transformers import AutoModel, AutoModelForCausalLM

from components.core.config import resolve
from components.core.params import Params
from components.planning.memory_model import Roles, rank_memory
from components.planning.model_shapes import shapes_of
from components.training.batches import Rollout, make_batch
from components.training.engine import DTYPES, DeepSpeedEngine
from components.training.networks import Actor, Critic
from components.training.ppo import Experience, update_actor, update_critic

RESULT = "RESULT "
# Least seconds that are left when a case is started.
LEAST_SECONDS = {"cuda": 60.0, "cpu": 20.0}
# Largest relative difference of losses and gradient norms between cases that divide the work differently.
TOLERANCES = {"float32": 1e-3, "bfloat16": 3e-2}
ADAPTER = ("policy.adapter.rank=32", "policy.adapter.alpha=64")


@dataclass(frozen=True)
class Case:
    """A network that `ranks` ranks train, `sequence_parallel` of them sharing a forward pass."""

    ranks: int
    network: str
    sequence_parallel: int = 1
    sets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        changed = [value.split(".")[-1] for value in self.sets if value not in ADAPTER]
        kind = "adapter" if ADAPTER[0] in self.sets else "full"
        return " ".join([f"{self.ranks}x{self.network}-sp{self.sequence_parallel}-{kind}", *changed])


# The most telling first, of each number of GPUs.
CASES = (
    Case(1, "actor", sets=ADAPTER),
    Case(1, "actor", sets=(*ADAPTER, "engine.activation_offload=true")),
    Case(1, "critic", sets=ADAPTER),
    Case(2, "actor", 1),
    Case(2, "actor", 2),
    Case(2, "critic", 2),
    Case(4, "actor", 4),
    Case(4, "actor", 2),
    Case(4, "actor", 1),
    Case(4, "critic", 4),
)


@dataclass(frozen=True)
class Update:
    """What one update of a case showed; memory in bytes, of the rank with the most."""

    length: int
    tokens: int
    seconds: float
    peak: float
    used: float
    planned: float
    pinned: float
    share: float | None
    loss: float
    norm: float


def rows(vocabulary: int, length: int, count: int) -> tuple[Rollout, Experience]:
    """Return `count` trajectories of `length` tokens, whose turns are 64 own tokens and 128 observed ones."""
    source = np.random.default_rng(0)
    places = np.arange(length)
    mask = ((places > 0) & (places % 192 >= 128)).astype(np.uint8)
    batch = make_batch([(source.integers(3, vocabulary, length), mask) for _ in range(count)])
    noise = torch.Generator().manual_seed(0)
    # About the log-probability of every token for random weights, so that few ratios are clipped.
    logprob = -torch.tensor(float(vocabulary)).log() + 0.1 * torch.randn(batch.tokens, generator=noise)
    zeros = torch.zeros(batch.tokens)
    experience = Experience(
        old_logprob=logprob,
        reference_logprob=zeros,
        advantages=torch.randn(batch.tokens, generator=noise),
        returns=1 + torch.randn(batch.tokens, generator=noise),
        importance=torch.ones(batch.tokens),
    )
    return Rollout(**vars(batch), sampler_logprob=logprob, rewards=torch.zeros(count)), experience


def planned_bytes(params: Params, config: Any, ranks: int, length: int) -> float:
    """Return the planner's figure for one network on one of the ranks."""
    shapes = shapes_of(config, config.model_type)
    trained = shapes.adapter_parameters(params.policy.adapter)
    roles = Roles(has_critic=False, has_reference=False, adapter_parameters=trained)
    memory = rank_memory(shapes, params.engine, roles, ranks=ranks, tokens=length, row=length)
    return float(memory.total)


def work(case: Case, model: str, params: Params, lengths: list[int]) -> None:
    """Train as one of the ranks of a case; rank 0 prints a line for each update."""
    settings, device, ppo = params.engine, params.device, params.agentic
    config, dtype = configuration(model), DTYPES[settings.dtype]
    if device == "cpu":
        torch.set_num_threads(1)
    factory = AutoModelForCausalLM if case.network == "actor" else AutoModel
    os.environ.setdefault("LOCAL_RANK", "0")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    loaded = random_network(factory, config, params)
    network: Actor | Critic
    if case.network == "actor":
        network = Actor(loaded, 1.0)
    else:
        network = Critic(loaded, config.hidden_size, dtype)
        # A head of zeros, as a new critic has it, would leave the backbone without gradient.
        torch.manual_seed(0)
        nn.init.normal_(network.value_head.weight, std=0.02)
    engine = DeepSpeedEngine(network, settings, device=device, gradient_clip=ppo.gradient_clip)
    world = engine.world
    for number, length in enumerate([lengths[0], *lengths]):
        batch, experience = rows(config.vocab_size, length, case.ranks)
        # One trajectory in each forward pass.
        engine.settings = settings.model_copy(update={"tokens_per_microbatch": length})
        with measured(device) as memory:
            began = time.perf_counter()
            if case.network == "actor":
                figures = update_actor(batch, experience, engine, ppo, 0, 100)
                loss, norm = figures["policy_loss"], figures["gradient_norm"]
            else:
                figures = update_critic(batch, experience, engine, ppo, 0)
                loss, norm = figures["value_loss"], figures["critic_gradient_norm"]
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        largest = torch.tensor([seconds, *memory], dtype=torch.float64, device=world.device)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        seconds, peak, used, pinned = largest.tolist()
        _, flops = training_flops(config, batch.lengths, batch.tokens, params.policy.adapter.rank > 0)
        rate = peak_flops() if device == "cuda" else None
        update = Update(
            length=length,
            tokens=sum(batch.lengths),
            seconds=seconds,
            peak=peak,
            used=used,
            planned=planned_bytes(params, config, case.ranks, length),
            pinned=pinned,
            share=flops / seconds / rate / case.ranks if rate else None,
            loss=loss,
            norm=norm,
        )
        if number and world.rank == 0:
            print(RESULT + json.dumps(dataclasses.asdict(update)), flush=True)
    distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # ZeRO 3 sometimes aborts when the interpreter ends ("terminate called without an active exception").
    os._exit(0)


@contextlib.contextmanager
def measured(device: str) -> Iterator[list[float]]:
    """Yield a list that has the largest, the used and the pinned bytes of this rank at the end."""
    found = [0.0, 0.0, 0.0]
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    yield found
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        found[:] = [float(torch.cuda.max_memory_allocated()), float(total - free), float(pinned)]


def run(case: Case, options: argparse.Namespace, sets: list[str], end: float) -> tuple[list[Update], str]:
    """Start the ranks of a case; return its updates, printed as they come, and why it failed, if it did."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(case.ranks), __file__, "--case", json.dumps(dataclasses.asdict(case))),
        *("--model", options.model, "--lengths", *map(str, options.lengths)),
        *(argument for value in sets for argument in ("--set", value)),
    ]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    stream = process.stdout

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    updates, log = [], []
    try:
        while (line := lines.get(timeout=max(0.1, end - time.monotonic()))) is not None:
            if line.startswith(RESULT):
                updates.append(Update(**json.loads(line.removeprefix(RESULT))))
                print_update(case, updates[-1])
            else:
                log.append(line)
        code = process.wait()
    except queue.Empty:
        return updates, "cut off, no time left"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{case.name.replace(' ', '-')}.log").write_text("".join(log))
    if code == 0:
        return updates, ""
    # The first error is the cause; launcher and other ranks add theirs.
    errors = [line.strip() for line in log if "Error" in line and "ChildFailedError" not in line]
    return updates, f"FAIL (exit code {code}) {(errors or ['', *log])[0][:300]}"


def print_update(case: Case, update: Update) -> None:
    def gigabytes(size: float | None) -> str:
        return f"{size / 1e9:7.1f}" if size else f"{'-':>7}"

    share = f"{100 * update.share:5.1f} %" if update.share is not None else f"{'-':>7}"
    print(
        f"{case.name:42} {update.length:7} {update.tokens:8} {update.seconds:8.2f}"
        f" {update.tokens / update.seconds:9.0f} {share} {gigabytes(update.peak)} {gigabytes(update.used)}"
        f" {gigabytes(update.planned)} {gigabytes(update.pinned)} {update.loss:12.6f} {update.norm:12.6f}",
        flush=True,
    )


def compare(found: dict[Case, list[Update]], tolerance: float) -> bool:
    """Print how much losses and norms differ among cases of the same ranks and network; False if too much."""
    good = True
    for number, (case, updates) in enumerate(found.items()):
        for other, others in list(found.items())[number + 1 :]:
            is_trained_alike = (ADAPTER[0] in case.sets) == (ADAPTER[0] in other.sets)
            if (case.ranks, case.network) != (other.ranks, other.network) or not is_trained_alike:
                continue
            for one, two in zip(updates, others, strict=False):
                loss = abs(one.loss - two.loss) / max(abs(one.loss), 1e-2)
                norm = abs(one.norm - two.norm) / max(one.norm, 1e-12)
                agrees = loss <= tolerance and norm <= tolerance
                good = good and agrees
                print(
                    f"{'OK' if agrees else 'FAIL':4} {case.name} and {other.name} at {one.length}:"
                    f" loss {one.loss:.6f} and {two.loss:.6f}, norm {one.norm:.6f} and {two.norm:.6f};"
                    f" relative difference {loss:.1e} and {norm:.1e}, at most {tolerance:.0e}",
                    flush=True,
                )
    return good


def main() -> int:
    """Run the cases, or one rank of a case, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="Qwen3-8B", choices=list(SHAPES))
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--gpus", type=int, help="GPUs, or processes on cpu; all GPUs, or 2, if left out")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--seconds", type=float, default=580, help="for all cases together")
    parser.add_argument("--only", action="append", default=[], help="only cases whose name begins so")
    parser.add_argument("--out", type=Path, help="folder for the cases' logs")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--case", help=argparse.SUPPRESS)  # a rank's own case, as json
    options = parser.parse_args()
    if options.case:
        read = json.loads(options.case)
        case = Case(**read | {"sets": tuple(read["sets"])})
        work(case, options.model, resolve("h20-pool", tuple(options.sets)).params, options.lengths)
    end = time.monotonic() + options.seconds
    options.lengths.sort()
    gpus = options.gpus or (torch.cuda.device_count() if options.device == "cuda" else 2)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    base = [
        f"device={options.device}",
        *(("engine.dtype=float32",) if options.device == "cpu" else ()),
        f"engine.mlp_tokens={min(8192, options.lengths[0] // 2)}",
        *("engine.zero_stage=3", "engine.activation_checkpointing=true", "engine.activation_offload=false"),
        *("engine.cpu_offload=false", "policy.adapter.rank=0"),
        *("agentic.epochs=1", "agentic.minibatches=1", "agentic.learning_rate_warmup_steps=0"),
        *("agentic.learning_rate=1e-6", "agentic.critic_learning_rate=1e-6"),
    ]
    print(f"{options.model}, {gpus} x {device}, torch {torch.__version__}")
    print(
        f"{'case':42} {'length':>7} {'tokens':>8} {'seconds':>8} {'tokens/s':>9} {'share':>7} {'peak':>7}"
        f" {'used':>7} {'planned':>7} {'pinned':>7} {'loss':>12} {'norm':>12}   memory in GB",
        flush=True,
    )
    found: dict[Case, list[Update]] = {}
    good = True
    # Cases of all GPUs first: they are why the machine has so many.
    for case in sorted(CASES, key=lambda case: (case.ranks > gpus, -case.ranks)):
        if options.only and not case.name.startswith(tuple(options.only)):
            continue
        if case.ranks > gpus:
            print(f"{case.name:42} not run: needs {case.ranks} GPUs", flush=True)
            continue
        if end - time.monotonic() < LEAST_SECONDS[options.device]:
            print(f"{case.name:42} not run: no time left", flush=True)
            continue
        sets = [*base, f"engine.sequence_parallel={case.sequence_parallel}", *case.sets, *options.sets]
        updates, failure = run(case, options, sets, end)
        found[case] = updates
        if failure:
            good = good and not failure.startswith("FAIL")
            print(f"{case.name:42} {failure}", flush=True)
    dtype = resolve("h20-pool", (*base, *options.sets)).params.engine.dtype
    return 0 if compare(found, TOLERANCES[dtype]) and good else 1


if __name__ == "__main__":
    sys.exit(main())
