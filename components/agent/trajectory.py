"""The trajectory: exactly what the policy saw and produced, in files of common formats.

`ids` holds the sampled token ids themselves; they are never encoded again from text.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from components.core.errors import UserError
from components.core.files import atomic_folder
from components.judge.verdict import Verdict

SEQUENCES: dict[str, type] = {"ids": np.int32, "action_mask": np.uint8, "sampler_logprob": np.float32}


@dataclass(frozen=True)
class ToolCall:
    """One tool call with its observation.

    `valid` is False when it did not parse, `verdicts` counts its verdicts.
    """

    name: str
    arguments: dict[str, Any]
    observation: str
    valid: bool = True
    verdicts: int = 0


@dataclass(frozen=True)
class Turn:
    """One assistant message, decoded as `text`, and its calls.

    `shortened` is the number of the oldest observations that were shortened in the history it was sampled
    from.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    shortened: int = 0


@dataclass(frozen=True)
class Trajectory:
    """One episode; sequences have the length of `ids` and are empty where the policy is a chat server.

    `action_mask` is 1 on the tokens that the policy sampled, and `sampler_logprob` their log-probability in
    nats, 0 elsewhere. `verdicts` are all in order; the last one, of the final answer, gives the milestone
    `reward`. `finish_reason` is stop, length (a token or context limit), turns, time or server (the policy's
    server failed, for the reason `error`). `policy_version` is the checkpoint's digest and update count.
    `files` are the candidate's at the end by workspace path, `start` those before the first turn. With
    `task`, the source, and `settings` (`device`, `in_turns`: several turns were allowed, `context`: window in
    tokens), a trajectory can be replayed without its data set.
    """

    task_id: str
    ids: tuple[int, ...]
    action_mask: tuple[int, ...]
    sampler_logprob: tuple[float, ...]
    turns: tuple[Turn, ...]
    verdicts: tuple[Verdict, ...]
    reward: float
    finish_reason: str
    policy_version: str
    files: dict[str, str] = field(default_factory=dict)
    error: str = ""
    task: str = ""
    start: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def final(self) -> Verdict:
        return self.verdicts[-1]


def save_trajectories(folder: Path, trajectories: list[Trajectory]) -> None:
    """Write trajectories.jsonl (all but tokens) and tokens.safetensors (`SEQUENCES` and offsets)."""
    lines = []
    for trajectory in trajectories:
        record = {key: value for key, value in asdict(trajectory).items() if key not in SEQUENCES}
        record["verdicts"] = [verdict.model_dump() for verdict in trajectory.verdicts]
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    tokens: dict[str, Any] = {
        name: np.array([x for trajectory in trajectories for x in getattr(trajectory, name)], dtype=dtype)
        for name, dtype in SEQUENCES.items()
    }
    offsets = list(itertools.accumulate((len(trajectory.ids) for trajectory in trajectories), initial=0))
    with atomic_folder(folder) as temporary:
        # A lone surrogate, which JSON can spell, is written as JSON's own escape.
        text = "".join(lines).encode(errors="backslashreplace")
        (temporary / "trajectories.jsonl").write_bytes(text)
        save_file(tokens | {"offsets": np.array(offsets, dtype=np.int64)}, temporary / "tokens.safetensors")


def load_trajectories(folder: Path) -> list[Trajectory]:
    """Read what `save_trajectories` wrote; raises UserError when a file is damaged or the two disagree."""
    try:
        records = [
            json.loads(line) for line in (folder / "trajectories.jsonl").read_text().split("\n") if line
        ]
        tokens = load_file(folder / "tokens.safetensors")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: not a folder of trajectories ({error}); give one that a stage wrote."
        ) from error
    offsets = tokens["offsets"].tolist()
    if len(offsets) != len(records) + 1 or offsets[-1] != len(tokens["ids"]):
        raise UserError(
            f"{folder}: trajectories.jsonl and tokens.safetensors disagree; restore both from the same run."
        )
    result = []
    for number, (record, start, end) in enumerate(zip(records, offsets[:-1], offsets[1:], strict=True), 1):
        sequences = {name: tuple(tokens[name][start:end].tolist()) for name in SEQUENCES}
        try:
            turns = tuple(
                Turn(**(turn | {"calls": tuple(ToolCall(**call) for call in turn["calls"])}))
                for turn in record["turns"]
            )
            verdicts = tuple(Verdict.model_validate(verdict) for verdict in record["verdicts"])
            result.append(Trajectory(**(record | {"turns": turns, "verdicts": verdicts} | sequences)))
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(
                f"{folder / 'trajectories.jsonl'}: line {number} is no trajectory ({error}); restore the "
                f"file from its run."
            ) from error
    return result
