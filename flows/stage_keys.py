"""The key of a stage, which is a digest of everything on which the stage's result depends.

A stage is a step of the pipeline with its own folder. A key is made of the parameters that the stage can read
and that change results, the digests of the stage's inputs, and the digests of its sources. What a key was
made of is stored in the stage's folder, so that a stage that runs again can log what has changed.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.agent.rewards import load_reward
from components.core.config import result_values
from components.core.errors import UserError
from components.core.files import digest_json
from components.core.params import Params
from components.core.records import FrozenModel, read_as
from components.core.sources import closure_digests, source_digest

# File in a stage's folder with the parts of its key.
KEY_FILE = "key.json"
# File in a stage's folder with the stage's record. It is written after Prefect has cached the record, so if
# the file exists, the cached record exists too.
RECORD = "record.json"
# Parameters that are read by every stage that samples trajectories and judges candidates.
SAMPLING = ("device", "precision", "seed", "sandbox", "policy.prompt", "policy.context", "policy.backend")
# Parameters that are read by every stage that trains the policy or the critic.
TRAINING = ("policy.adapter", "engine")
# Modules at which the code of sampling and judging begins, and that of making demonstrations.
SAMPLING_SOURCES = ("components.agent.episode", "components.judge.pool.local_pool")
COLD_START_SOURCES = ("components.bootstrap.demonstrations", "components.synthesis.core_composer")


@dataclass(frozen=True)
class Reads:
    """The inputs that the code of a stage (a step of the pipeline) can read, apart from files.

    `params` are sections or single parameters by their dotted names. `modules` are the modules at which the
    stage's code begins; all modules of the project that they import belong to it.
    """

    params: tuple[str, ...]
    modules: tuple[str, ...]


# What each form of a stage can read, by the form's name, which also begins the name of its folder.
READS = {
    "coldstart": Reads(
        (
            *("device", "data", "coldstart", "policy.hidden", "policy.layers", "policy.heads"),
            *("policy.kv_heads", "policy.head_dim", "policy.feed_forward", "policy.vocabulary"),
            "policy.context",
        ),
        ("components.bootstrap.cold_start", *COLD_START_SOURCES),
    ),
    # The cold start of a language model.
    "fine_tuned": Reads(
        (*("device", "data", "coldstart", "policy.context", "policy.prompt"), "rejection", *TRAINING),
        ("components.training.fine_tuning", *COLD_START_SOURCES),
    ),
    "adopted": Reads((), ("components.policy.first_policy",)),
    "champion": Reads((), ("components.policy.checkpoint",)),
    "warmup": Reads(
        (*SAMPLING, *TRAINING, "reward", "warmup", "data.weigh_by_headroom", "policy.push_pause"),
        ("components.training.ppo", *SAMPLING_SOURCES),
    ),
    # Stage 2 adds demonstrations of the cold start to the policy's own trajectories.
    "rejection": Reads(
        (
            *(*SAMPLING, *TRAINING, "reward", "rejection", "warmup.gradient_clip"),
            *("coldstart", "data"),
        ),
        ("components.training.rejection", *SAMPLING_SOURCES, *COLD_START_SOURCES),
    ),
    "critic": Reads(
        ("device", "seed", *TRAINING, "critic", "agentic.gamma", "agentic.gradient_clip"),
        ("components.training.critic",),
    ),
    "agentic": Reads(
        (*SAMPLING, *TRAINING, "reward", "agentic", "data.weigh_by_headroom", "policy.push_pause"),
        ("components.training.ppo", *SAMPLING_SOURCES),
    ),
    "evaluation": Reads(
        (
            *(*SAMPLING, "engine.dtype", "evaluation.suite", "evaluation.levels", "evaluation.dtype"),
            "evaluation.numel",
            *("evaluation.attempts", "evaluation.temperature", "evaluation.max_turns"),
            "evaluation.max_new_tokens",
        ),
        ("components.evaluation.evaluate", "components.agent.policies", *SAMPLING_SOURCES),
    ),
}


class KeyParts(FrozenModel):
    """The values and digests from which the key of a stage (a step of the pipeline) is computed.

    `name` is the form of the stage, a way to make it, which is a key of READS. `params` has the values of the
    parameters that the stage reads by dotted name, `upstream` the digests of its inputs by name, and
    `sources` those of its source files by path. `redo` is the number of the run's newest `--from` request to
    run stages again (`Rerun`), or 0 if that request does not include the stage.
    """

    name: str
    params: dict[str, Any]
    upstream: dict[str, str]
    sources: dict[str, str]
    redo: int

    @property
    def key(self) -> str:
        return digest_json(self.model_dump(mode="json"))

    def folder(self, home: Path) -> Path:
        """Return the folder of the stage, `home`/stages/`name`-KEY with the first 12 digits of its key."""
        return home / "stages" / f"{self.name}-{self.key[:12]}"

    def changes(self, older: "KeyParts") -> list[str]:
        """Return a phrase for each parameter, input and source file that differs from those of `older`.

        Examples of phrases are "seed 1 -> 2", "input policy" and the path of a file. "--from" is added if
        `redo` differs, which means that a `--from` request to run stages again was made between the two.
        """
        found = [
            f"{name} {older.params.get(name, 'absent')!r} -> {self.params.get(name, 'absent')!r}"
            for name in _different(older.params, self.params)
        ]
        found += [f"input {name}" for name in _different(older.upstream, self.upstream)]
        found += _different(older.sources, self.sources)
        return found + (["--from"] if self.redo != older.redo else [])


def _different(older: dict[str, Any], newer: dict[str, Any]) -> list[str]:
    return sorted(
        name for name in older.keys() | newer.keys() if older.get(name, ...) != newer.get(name, ...)
    )


def key_parts(params: Params, name: str, upstream: dict[str, str], redo: int) -> KeyParts:
    """Return everything that enters the key of the stage with the form `name`, which is a key of READS.

    A form is a way to make a stage (a step of the pipeline); `coldstart` has several, such as `adopted`.
    `upstream` maps the names of the stage's inputs to their digests. `redo` is the number of the run's newest
    `--from` request to run stages again, or 0 if that request does not include the stage.
    """
    reads = READS[name]
    return KeyParts(
        name=name,
        params=result_values(params, reads.params),
        upstream=upstream,
        sources=closure_digests(*reads.modules)
        | (reward_digests(params.reward) if "reward" in reads.params else {}),
        redo=redo,
    )


def reward_digests(reward: str) -> dict[str, str]:
    """Return the digests of the sources of the reward function whose import path is `reward`.

    For a function of this project, they are the digests of its module and of all modules that this imports,
    by path. For any other function, the result has only the digest of its module, by the module's name.
    Raises UserError if the function cannot be imported or has no source file.
    """
    module = load_reward(reward).__module__
    if module.startswith("components."):
        return closure_digests(module)
    source = getattr(sys.modules[module], "__file__", None)
    if source is None:
        raise UserError(
            f"params.yaml: reward: the module {module} has no source file; put the function into one."
        )
    return {module: source_digest(Path(source))}


def changes_since_last(parts: KeyParts, home: Path) -> list[str]:
    """Return phrases for what differs between `parts` and the key of the newest other stage of the same form.

    `home` is the folder of all runs, whose folder `stages` is searched. The phrases are such as "seed 1 -> 2"
    (`KeyParts.changes`). The list is empty if there is no such stage.
    """
    files = set((home / "stages").glob(f"{parts.name}-*/{KEY_FILE}")) - {parts.folder(home) / KEY_FILE}
    newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
    return parts.changes(read_as(KeyParts, newest, "delete its folder")) if newest else []
