"""A small real world for tests of training: a random Qwen3 of a few thousand parameters, a byte tokenizer, tasks, and
episodes whose reward is a rule over the sampled tokens. Everything but the kernel and its judge is the real thing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from components.agent.trajectory import ToolCall, Trajectory, Turn
from components.core.config import Params, resolve
from components.core.progress import Quiet
from components.core.task import KernelTask, write_tasks
from components.judge.pool import Job, JudgePool
from components.judge.verdict import Verdict
from components.policy.checkpoint import save_checkpoint
from components.policy.sampler import Sampler
from components.training.stage import Stage

VOCABULARY = 32
GOOD = 7
"""The rule: a trajectory earns by how often it says this token."""


def tiny_policy(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=64,
            max_position_embeddings=128,
            tie_word_embeddings=True,
        )
    ).eval()


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    vocabulary = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2} | {
        chr(94 + i): i for i in range(3, VOCABULARY)
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template="{{ messages }}",
    )


class NoPool:
    """The rule judges in `episodes`; a job here would be a mistake of the test."""

    def submit(self, job: Job) -> Future[Verdict]:
        raise AssertionError(f"no job expected, {job.task.task_id} was submitted")

    def drop(self) -> None: ...

    def close(self) -> None: ...


def episodes(
    tasks: Sequence[KernelTask],
    *,
    params: Params,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    pool: JudgePool,
    epoch: str,
    seed: int,
    max_turns: int,
    max_new_tokens: int,
    temperature: float,
    on_progress: Callable[[int, int], None],
) -> list[Trajectory]:
    """Up to two turns with an observation between them; the reward grows with the share of `GOOD` among the own tokens."""
    prompts = [[1, *(3 + int(digit, 16) for digit in task.task_id[:5])] for task in tasks]
    ids, masks, logprobs, finished = (
        [list(p) for p in prompts],
        [[0] * len(p) for p in prompts],
        [[0.0] * len(p) for p in prompts],
        ["stop"] * len(prompts),
    )
    turns: list[list[Turn]] = [[] for _ in prompts]
    for turn in range(min(2, max_turns)):
        for index, completion in enumerate(
            sampler.generate(ids, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + turn)
        ):
            ids[index] += completion.ids
            masks[index] += [1] * len(completion.ids)
            logprobs[index] += completion.logprobs
            finished[index] = "stop"
            turns[index].append(
                Turn(
                    tokenizer.decode(completion.ids),
                    (ToolCall("Write", {"content": list(completion.ids)}, "ok"),),
                )
            )
            if turn + 1 < min(2, max_turns):
                ids[index] += [1, 9, 9]
                masks[index] += [0, 0, 0]
                logprobs[index] += [0.0, 0.0, 0.0]
    trajectories = []
    for index, task in enumerate(tasks):
        own = [token for token, mask in zip(ids[index], masks[index], strict=True) if mask]
        share = own.count(GOOD) / len(own)
        reward = -1 if share == 0 else 1 if share < 0.2 else 2 if share < 0.5 else 3
        verdict = Verdict(status="correct" if reward > 0 else "wrong_output", milestone=reward)
        trajectories.append(
            Trajectory(
                task.task_id,
                tuple(ids[index]),
                tuple(masks[index]),
                tuple(logprobs[index]),
                tuple(turns[index]),
                (verdict,),
                float(reward),
                finished[index],
                sampler.version,
                {"kernels/forward.cpp": f"{own}"},
            )
        )
        on_progress(index + 1, len(tasks))
    return trajectories


def params(*sets: str) -> Params:
    """The ci profile at the size of these tests."""
    small = (
        "policy.batch=64",
        "warmup.rollouts.tasks=8",
        "warmup.rollouts.samples=4",
        "warmup.rollouts.max_new_tokens=8",
        "agentic.rollouts.tasks=8",
        "agentic.rollouts.samples=4",
        "agentic.rollouts.max_new_tokens=6",
        "rejection.rollouts.tasks=8",
        "rejection.rollouts.samples=4",
        "rejection.rollouts.max_new_tokens=6",
        "rejection.replay_share=0",
        "warmup.max_entropy=10",
        "agentic.max_entropy=10",
        "engine.tokens_per_microbatch=256",
    )
    return resolve("ci", small + sets).params


def stage(folder: Path, name: str, *sets: str, actor: Path | None = None) -> Stage:
    """A stage whose actor (unless given) and data set are made in `folder`."""
    parameters = params(*sets)
    dataset = folder / "data"
    if not dataset.is_dir():
        source = "class Model:\n    size = {}\n\n\ndef get_inputs():\n    return []\n\n\ndef get_init_inputs():\n    return []\n"
        write_tasks(dataset / "tasks.parquet", [KernelTask(code=source.format(i)) for i in range(12)])
    start = actor or folder / "start"
    if not start.is_dir():
        save_checkpoint(
            start,
            tiny_policy(),
            tiny_tokenizer(),
            stage="coldstart",
            parent=None,
            dataset="",
            code="",
            params={"device": "cpu"},
            figures={},
        )
    return Stage(name, parameters, start, dataset, folder / name, NoPool(), Quiet(), "test")
