"""The two kinds of policy that can be evaluated: a folder that is sampled here, and a server that speaks text.

Both make their trajectories in the agent loop and are asked the same way; `optimize` finds them, this file says how an
evaluation samples them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from components.agent.chat_rollout import Chat, run_chats
from components.agent.episode import Limits
from components.agent.policies import MANY_TURNS, FolderPolicy, ServerPolicy
from components.agent.token_rollout import run_episodes
from components.agent.trajectory import Trajectory
from components.core.config import Params
from components.core.errors import UserError
from components.core.files import digest_json, digest_tree
from components.core.task import KernelTask
from components.judge.pool import JudgePool
from components.policy.backends import open_sampler
from components.policy.checkpoint import MANIFEST, load_tokenizer, verify_checkpoint
from components.policy.sampler import Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Policy(Protocol):
    """What is evaluated. `params` are those that it is sampled with, `digest` names it: equal digests are the same policy."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def params(self) -> Params: ...

    def __call__(
        self,
        tasks: Sequence[KernelTask],
        pool: JudgePool,
        *,
        epoch: str,
        seed: int,
        on_progress: Callable[[int, int], None],
    ) -> list[Trajectory]: ...


@dataclass(frozen=True)
class Checkpoint:
    """A folder; its model is loaded with the first question, so that a finished evaluation loads none."""

    folder: Path
    params: Params
    digest: str

    @property
    def name(self) -> str:
        return str(self.folder)

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.folder)

    @functools.cached_property
    def sampler(self) -> Sampler:
        return open_sampler(self.params, self.folder, self.tokenizer, version=self.digest)

    def __call__(
        self,
        tasks: Sequence[KernelTask],
        pool: JudgePool,
        *,
        epoch: str,
        seed: int,
        on_progress: Callable[[int, int], None],
    ) -> list[Trajectory]:
        settings = self.params.evaluation
        return run_episodes(
            tasks,
            params=self.params,
            sampler=self.sampler,
            tokenizer=self.tokenizer,
            pool=pool,
            epoch=epoch,
            seed=seed,
            max_turns=settings.max_turns,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            on_progress=on_progress,
        )


@dataclass(frozen=True)
class Served:
    """An OpenAI-compatible server and one of its models. Its digest is their names: what weights it holds, only it knows."""

    chat: Chat
    params: Params

    @property
    def name(self) -> str:
        return self.chat.version

    @property
    def digest(self) -> str:
        return digest_json(["server", self.chat.version])

    def __call__(
        self,
        tasks: Sequence[KernelTask],
        pool: JudgePool,
        *,
        epoch: str,
        seed: int,
        on_progress: Callable[[int, int], None],
    ) -> list[Trajectory]:
        settings = self.params.evaluation
        return run_chats(
            tasks,
            params=self.params,
            chat=self.chat,
            pool=pool,
            epoch=epoch,
            seed=seed,
            limits=Limits(settings.max_turns, settings.max_new_tokens),
            temperature=settings.temperature,
            on_progress=on_progress,
        )


def checkpoint_policy(folder: Path, params: Params) -> Checkpoint:
    """The policy in `folder`, once every file was found to match its manifest; a Hugging Face folder is what its files are."""
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder}: no model in this folder, config.json is missing; give a checkpoint or a Hugging Face folder."
        )
    return Checkpoint(
        folder,
        params,
        verify_checkpoint(folder).digest
        if (folder / MANIFEST).is_file()
        else digest_json(digest_tree(folder)),
    )


def named_policy(found: FolderPolicy | ServerPolicy, chosen: frozenset[str]) -> Policy:
    """What a person named, as an evaluation asks it. A policy with the full prompt gets as many turns as `optimize` gives
    it where the profile has fewer; `chosen` are parameters that a person has set, which stay."""
    params = found.params
    if params.policy.prompt == "full" and "evaluation.max_turns" not in chosen:
        turns = max(MANY_TURNS, params.evaluation.max_turns)
        params = params.model_copy(
            update={"evaluation": params.evaluation.model_copy(update={"max_turns": turns})}
        )
    return (
        Served(found.chat, params)
        if isinstance(found, ServerPolicy)
        else Checkpoint(found.folder, params, found.digest)
    )
