"""vLLM backends on a GPU against the trainer's network: agreement, speed, cost of new weights.

    PYTHONPATH=. python tests/device/vllm_backends.py [--vllm FILE] [--checkpoint FOLDER] [--sequences 256]
        [--limit 256]

Needs a GPU, this project's base packages, and vLLM 0.24 or newer (for ipc ray too) in an environment of its
own, whose executable --vllm names; no pytest, no DeepSpeed, no judge. Without a checkpoint a random policy of
the base parameters' size is made. Each backend runs in a process of its own: it is opened on the checkpoint,
the trainer's weights are then changed and pushed (the push checks the worker's fingerprint and fails when it
differs), and everything is sampled once more. One line for each backend:

    difference   mean absolute difference of log-probabilities to the trainer's, nats per token, after a push
    stale        the same against weights that were not pushed: what a lost push would look like
    tokens/s     sampled tokens per second, one batch of all sequences
    push s       seconds of one push, mean of three
    turns/s      tokens per second of sessions of four turns, each of which begins when the last one ended
    hits         share of the prompts' tokens of these sessions that the servers' caches had

Exit code 1 when a backend failed or agrees no better than stale weights do.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from components.agent.policies import open_sampler
from components.bootstrap.cold_start import new_model
from components.bootstrap.tokenizer import train_tokenizer
from components.core.config import resolve
from components.core.params import Params
from components.policy.checkpoint import BUCKET_BYTES, load_model, load_tokenizer
from components.policy.sampler import Completion, Sampler, complete_all
from components.policy.transformers_sampler import TransformersSampler
from components.policy.vllm.sampler import VllmSampler
from components.policy.vllm.start import launches, running
from components.policy.weight_stream import weight_buckets

CASES = ("transformers", "vllm-server ipc", "vllm-server disk")
NOISE = 0.02
"""Relative size of the change between pushes: above rounding, but sampling stays alike."""


def params_of(case: str, url: str, dtype: str) -> Params:
    backend, _, transfer = case.partition(" ")
    sets = [
        f"policy.backend={backend}",
        f"policy.servers={url}",
        f"policy.weight_transfer={transfer or 'ipc'}",
        "policy.sleep=true",
    ]
    return resolve("", (*sets, "policy.context=4096", f"engine.dtype={dtype}", "policy.batch=256")).params


def make_checkpoint(folder: Path) -> None:
    """A random policy of the base parameters' size that vLLM loads."""
    params = params_of("transformers", "", "bfloat16")
    tokenizer = train_tokenizer([{"role": "user", "content": "x"}], 320, params.policy.context)
    model = new_model(params, len(tokenizer), tokenizer)
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def server(case: str, vllm: Path, folder: Path, dtype: str) -> Iterator[str]:
    """Yield the address of a vLLM server on the first GPU, empty for the backend transformers.

    `vllm` is the executable of vLLM's environment.
    """
    if case == "transformers":
        yield ""
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (launch,) = launches(
        params_of(case, "", dtype),
        folder,
        vllm=str(vllm),
        gpus=["0"],
        tensor_parallel=1,
        host="127.0.0.1",
        ports=[port],
        logs=folder.parent / case.replace(" ", "-"),
    )
    with running([launch], print):
        yield launch.url


def difference(
    model: PreTrainedModel, prompts: Sequence[list[int]], completions: Sequence[Completion]
) -> float:
    """Mean absolute difference of the own tokens' log-probabilities (nats)."""
    total, tokens = 0.0, 0
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.ids]], device="cuda")
        with torch.no_grad():
            scores = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        own = scores.gather(1, ids[0, len(prompt) :, None])[:, 0].double().cpu()
        total += float((own - torch.tensor(completion.logprobs, dtype=torch.float64)).abs().sum())
        tokens += len(completion.ids)
    return total / tokens


def change(model: PreTrainedModel, seed: int) -> None:
    """Move every weight a little, as an optimizer step does."""
    source = torch.Generator("cuda").manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=source, device="cuda", dtype=torch.float32)
            parameter.add_((NOISE * parameter.float().std().nan_to_num(0.01) * noise).to(parameter.dtype))


async def converse(sampler: Sampler, prompts: Sequence[list[int]], limit: int) -> int:
    """Sample four turns of a session for each prompt, and return the number of sampled tokens."""

    async def session(index: int) -> int:
        ids, count = list(prompts[index]), 0
        for turn in range(4):
            found = await sampler.complete(
                ids,
                max_new_tokens=limit // 4,
                temperature=1.0,
                seed=4 * index + turn,
                session=f"turns-{index}",
            )
            ids, count = [*ids, *found.ids, *prompts[index - 1][:32]], count + len(found.ids)
        return count

    return sum(await asyncio.gather(*(session(index) for index in range(len(prompts)))))


def measure(case: str, vllm: Path, folder: Path, sequences: int, limit: int, dtype: str) -> dict[str, Any]:
    """One backend's line of the table."""
    with server(case, vllm, folder, dtype) as url:
        params = params_of(case, url, dtype)
        tokenizer = load_tokenizer(folder)
        sampler = open_sampler(params, folder, tokenizer, version="0")
        trained = load_model(folder, dtype=getattr(torch, dtype), device="cuda")
        publish: Callable[[int], float]
        if isinstance(sampler, VllmSampler):
            servers = sampler
            published = folder.parent / f"published-{case.replace(' ', '-')}"

            def publish(number: int) -> float:
                started = time.monotonic()
                if params.policy.weight_transfer == "disk":
                    trained.save_pretrained(published)
                servers.push(weight_buckets(trained, BUCKET_BYTES), version=str(number), folder=published)
                return time.monotonic() - started

        else:

            def publish(number: int) -> float:
                started = time.monotonic()
                assert isinstance(sampler, TransformersSampler)
                sampler.model.load_state_dict(trained.state_dict())
                return time.monotonic() - started

        source = torch.Generator().manual_seed(0)
        prompts = [
            torch.randint(
                3, 200, (int(torch.randint(32, 256, (1,), generator=source)),), generator=source
            ).tolist()
            for _ in range(sequences)
        ]
        complete_all(sampler, prompts[:8], max_new_tokens=8, temperature=1.0, seed=0)
        seconds = []
        for number in range(1, 4):
            change(trained, number)
            if isinstance(sampler, VllmSampler):
                sampler.sleep()
            seconds.append(publish(number))
        started = time.monotonic()
        found = complete_all(sampler, prompts, max_new_tokens=limit, temperature=1.0, seed=1)
        elapsed = time.monotonic() - started
        agreement = difference(trained, prompts, found)
        greedy = complete_all(sampler, prompts[:16], max_new_tokens=limit, temperature=0.0, seed=1)
        agreement_greedy = difference(trained, prompts[:16], greedy)
        if isinstance(sampler, VllmSampler):
            sampler.fleet.figures()
        began = time.monotonic()
        in_turns = asyncio.run(converse(sampler, prompts, limit)) / (time.monotonic() - began)
        if isinstance(sampler, VllmSampler):
            # The fleet reads the figures of its servers every two seconds.
            time.sleep(5)
        hits = (
            sampler.fleet.figures().get("sampler_prefix_hits", 0.0)
            if isinstance(sampler, VllmSampler)
            else 0.0
        )
        change(trained, 9)
        return {
            "backend": case,
            "difference": agreement,
            "greedy": agreement_greedy,
            "stale": difference(trained, prompts, found),
            "tokens/s": sum(len(completion.ids) for completion in found) / elapsed,
            "push s": sum(seconds) / len(seconds),
            "turns/s": in_turns,
            "hits": hits,
            "parameters": sum(parameter.numel() for parameter in trained.parameters()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm", type=Path, default=Path("vllm"), help="vllm executable of the environment of vLLM"
    )
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--limit", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--case", choices=CASES, help="one backend, in this process; prints its figures as JSON"
    )
    arguments = parser.parse_args()
    if arguments.case:
        print(
            "RESULT "
            + json.dumps(
                measure(
                    arguments.case,
                    arguments.vllm,
                    arguments.checkpoint,
                    arguments.sequences,
                    arguments.limit,
                    arguments.dtype,
                )
            ),
            flush=True,
        )
        # Threads that wait for connections may outlive the interpreter's patience.
        os._exit(0)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.checkpoint
        if folder is None:
            folder = Path(temporary) / "policy"
            make_checkpoint(folder)
        print(
            f"{'backend':<18}{'difference':>12}{'greedy':>12}{'stale':>12}{'tokens/s':>12}"
            f"{'push s':>10}{'turns/s':>10}{'hits':>7}",
            flush=True,
        )
        for case in CASES:
            command = [
                sys.executable,
                __file__,
                "--case",
                case,
                "--vllm",
                str(arguments.vllm),
                "--checkpoint",
                str(folder),
                "--sequences",
                str(arguments.sequences),
            ]
            command += ["--limit", str(arguments.limit), "--dtype", arguments.dtype]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
            lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                print(
                    f"{case:<18} failed (exit code {ran.returncode}):\n{(ran.stdout + ran.stderr)[-3000:]}",
                    flush=True,
                )
                failed = True
                continue
            row = json.loads(lines[-1].removeprefix("RESULT "))
            figures = "".join(f"{row[name]:>12.5f}" for name in ("difference", "greedy", "stale"))
            figures += (
                f"{row['tokens/s']:>12.0f}{row['push s']:>10.3f}{row['turns/s']:>10.0f}{row['hits']:>7.2f}"
            )
            print(f"{case:<18}{figures}", flush=True)
            failed |= not row["difference"] < 0.5 * row["stale"]
    sys.exit(failed)


if __name__ == "__main__":
    main()
