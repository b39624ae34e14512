"""Seconds of a push of weights to a vLLM server, by each transfer.

    PYTHONPATH=. python tests/device/push_weights.py [--vllm FILE] [--sizes 135M 1.7B 8B]
        [--transfers disk nccl ipc]

Needs two GPUs, this project's base packages, and vLLM 0.24 or newer in an environment of its own, whose
executable --vllm names and whose NCCL has the version of this one. For each size, a model with random weights
on the first GPU and a server are started: on the second GPU for disk and NCCL, and on the first one for ipc.
Every push changes all weights, and fails unless the server then has exactly the new ones. A push by disk
includes the writing of the checkpoint. The server's cache has a fixed size, because vLLM cannot measure how
much fits while other processes use its GPU. One line for each transfer:

    first s   seconds of the first push, in which NCCL connects the processes
    push s    seconds of a later push, mean of three

While a push lasts longer than a minute, the stacks of all threads are printed every minute. If a push fails,
the end of the server's log is.
"""

import argparse
import faulthandler
import itertools
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from components.bootstrap.tokenizer import train_tokenizer
from components.core.config import resolve
from components.core.params import Params
from components.policy.checkpoint import BUCKET_BYTES, write_model
from components.policy.vllm.fleet import Fleet
from components.policy.vllm.sampler import VllmSampler
from components.policy.vllm.start import launches, running
from components.policy.weight_stream import weight_buckets

CONTEXT, CACHE_BYTES = 4096, 4_000_000_000
# Transfers by the GPU of the server.
TRANSFERS = {"1": ("disk", "nccl"), "0": ("ipc",)}
# Width, layers, heads, key and value heads, head dimension, feed-forward width and vocabulary of a model.
SIZES = {
    "135M": (576, 30, 9, 3, 64, 1536, 49152),
    "1.7B": (2048, 28, 16, 8, 128, 6144, 151936),
    "8B": (4096, 36, 32, 8, 128, 12288, 151936),
}


def params_of(transfer: str) -> Params:
    sets = ("policy.backend=vllm-server", "policy.servers=http://127.0.0.1", f"policy.context={CONTEXT}")
    sets += (f"policy.weight_transfer={transfer}", "policy.gpu_memory_share=0.3", "engine.dtype=bfloat16")
    options = f"[--enforce-eager,--kv-cache-memory-bytes,{CACHE_BYTES}]"
    return resolve("", (*sets, f"policy.vllm_options={options}")).params


def make_model(size: str) -> PreTrainedModel:
    """Return a Qwen3 with random weights in bfloat16 on the first GPU."""
    width, layers, heads, kv_heads, head_dim, feed_forward, vocabulary = SIZES[size]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=feed_forward,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=size != "8B",
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda:0"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def measure(transfer: str, url: str, model: PreTrainedModel, folder: Path) -> list[float]:
    """Return the seconds of each of four pushes; `folder` is where a checkpoint may be written."""
    fleet = Fleet([url], context=CONTEXT, version="0")
    sampler = VllmSampler(fleet, (2,), params_of(transfer).policy, version="0")
    seconds = []
    for number in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.25)
        torch.cuda.synchronize()
        started = time.monotonic()
        faulthandler.dump_traceback_later(60, repeat=True)
        if transfer == "disk":
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            write_model(folder, model)
        sampler.push(weight_buckets(model, BUCKET_BYTES), version=str(number), folder=folder)
        faulthandler.cancel_dump_traceback_later()
        seconds.append(time.monotonic() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", default="vllm", help="vllm executable of the environment of vLLM")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    every = sum(TRANSFERS.values(), ())
    parser.add_argument("--transfers", nargs="+", choices=every, default=every)
    arguments = parser.parse_args()
    # So that the servers are stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(f"{'size':<8}{'GB':>8}  {'transfer':<10}{'first s':>10}{'push s':>10}", flush=True)
    for size, (gpu, transfers) in itertools.product(arguments.sizes, TRANSFERS.items()):
        chosen = [transfer for transfer in transfers if transfer in arguments.transfers]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory() as temporary, socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            probe.close()
            model, folder = make_model(size), Path(temporary) / "policy"
            model.save_pretrained(folder)
            train_tokenizer([{"role": "user", "content": "x"}], 320, CONTEXT).save_pretrained(folder)
            fleet = launches(
                params_of(chosen[0]),
                folder,
                vllm=arguments.vllm,
                gpus=[gpu],
                tensor_parallel=1,
                host="127.0.0.1",
                ports=[port],
                logs=Path(temporary) / "logs",
            )
            gigabytes = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
            with running(fleet, print):
                for transfer in chosen:
                    try:
                        first, *later = measure(transfer, fleet[0].url, model, Path(temporary) / "published")
                    except BaseException:
                        print(fleet[0].log.read_text()[-8000:], flush=True)
                        raise
                    row = f"{size:<8}{gigabytes:>8.2f}  {transfer:<10}"
                    print(f"{row}{first:>10.2f}{sum(later) / len(later):>10.2f}", flush=True)
            del model
    # The threads of the fleets go on.
    os._exit(0)


if __name__ == "__main__":
    main()
