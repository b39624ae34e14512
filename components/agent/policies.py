"""The two kinds of policy that can optimise a module: a folder that is sampled here, and a server that speaks text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from components.agent.chat_rollout import Chat, run_chats
from components.agent.episode import Limits
from components.agent.token_rollout import run_episodes
from components.agent.trajectory import Trajectory
from components.core.config import Params
from components.core.errors import UserError
from components.core.files import digest_json, digest_tree, read_json
from components.core.task import KernelTask
from components.judge.pool import JudgePool
from components.policy.checkpoint import MANIFEST, load_model, load_tokenizer, loading, verify_checkpoint

LONG_CONTEXT = 32_768
LONG_TURN = 8192
MANY_TURNS = 30
FULL_ATTEMPTS, COMPACT_ATTEMPTS = 4, 24


@dataclass(frozen=True)
class SearchBudget:
    """How hard to try; None stands for what suits the policy."""

    attempts: int | None = None
    turns: int | None = None
    temperature: float = 1.0


@dataclass(frozen=True)
class FolderPolicy:
    """A checkpoint or Hugging Face folder, sampled in this process. `params` are those that the policy was made for."""

    folder: Path
    params: Params
    digest: str
    effort: SearchBudget

    @property
    def name(self) -> str:
        return self.digest[:16]

    @property
    def compact(self) -> bool:
        return self.params.policy.prompt == "compact"

    @property
    def attempts(self) -> int:
        return self.effort.attempts or (COMPACT_ATTEMPTS if self.compact else FULL_ATTEMPTS)

    @property
    def turns(self) -> int:
        return self.effort.turns or (self.params.evaluation.max_turns if self.compact else MANY_TURNS)

    def __call__(
        self,
        task: KernelTask,
        count: int,
        pool: JudgePool,
        *,
        epoch: str,
        deadline: float | None,
        on_progress: Callable[[int, int], None],
    ) -> list[Trajectory]:
        from components.policy.transformers_sampler import TransformersSampler

        params = self.params
        tokenizer = load_tokenizer(self.folder)
        model = load_model(self.folder, dtype=params.engine.dtype, device=params.device)
        return run_episodes(
            [task] * count,
            params=params,
            sampler=TransformersSampler(
                model, tokenizer, batch=params.policy.batch, device=params.device, version=self.digest
            ),
            tokenizer=tokenizer,
            pool=pool,
            epoch=epoch,
            seed=params.seed,
            max_turns=self.turns,
            max_new_tokens=params.evaluation.max_new_tokens,
            temperature=self.effort.temperature,
            deadline=deadline,
            shorten=True,
            on_progress=on_progress,
        )


@dataclass(frozen=True)
class ServerPolicy:
    """An OpenAI-compatible server."""

    chat: Chat
    params: Params
    effort: SearchBudget

    @property
    def name(self) -> str:
        return self.chat.version

    @property
    def attempts(self) -> int:
        return self.effort.attempts or FULL_ATTEMPTS

    @property
    def turns(self) -> int:
        return self.effort.turns or MANY_TURNS

    def __call__(
        self,
        task: KernelTask,
        count: int,
        pool: JudgePool,
        *,
        epoch: str,
        deadline: float | None,
        on_progress: Callable[[int, int], None],
    ) -> list[Trajectory]:
        return run_chats(
            [task] * count,
            params=self.params,
            chat=self.chat,
            pool=pool,
            epoch=epoch,
            seed=self.params.seed,
            limits=Limits(self.turns, self.params.evaluation.max_new_tokens, deadline),
            temperature=self.effort.temperature,
            on_progress=on_progress,
        )


def folder_policy(folder: Path, params: Params, chosen: frozenset[str], effort: SearchBudget) -> FolderPolicy:
    """The policy in `folder`. What it was trained with (its prompt, its window) comes from its manifest; a Hugging Face
    folder without one gets the full prompt and its own window. `chosen` names parameters that a person has set."""
    if not (folder / "config.json").is_file():
        raise UserError(
            f"--policy {folder}: no model in this folder, config.json is missing; give champion, a checkpoint, a Hugging Face folder, or an http address."
        )
    if (folder / MANIFEST).is_file():
        manifest = verify_checkpoint(folder, params.device)
        digest, made_for = manifest.digest, manifest.params
        policy = {
            key: made_for["policy"][key] for key in ("prompt", "context") if key in made_for.get("policy", {})
        }
    else:
        digest = digest_json(digest_tree(folder))
        with loading(folder, "config.json"):
            window = int(read_json(folder / "config.json").get("max_position_embeddings", LONG_CONTEXT))
        policy = {"prompt": "full", "context": min(window, LONG_CONTEXT)}
    return FolderPolicy(folder, with_policy(params, policy, chosen), digest, effort)


def server_policy(chat: Chat, params: Params, chosen: frozenset[str], effort: SearchBudget) -> ServerPolicy:
    return ServerPolicy(
        chat, with_policy(params, {"prompt": "full", "context": LONG_CONTEXT}, chosen), effort
    )


def with_policy(params: Params, values: dict[str, object], chosen: frozenset[str]) -> Params:
    """`params` with the policy's own prompt and window, and long turns for the full prompt; what a person chose stays."""
    policy = params.policy.model_copy(
        update={key: value for key, value in values.items() if f"policy.{key}" not in chosen}
    )
    evaluation = params.evaluation
    if policy.prompt == "full" and "evaluation.max_new_tokens" not in chosen:
        evaluation = evaluation.model_copy(update={"max_new_tokens": min(LONG_TURN, policy.context // 4)})
    return params.model_copy(update={"policy": policy, "evaluation": evaluation})
