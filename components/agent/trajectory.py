"""The trajectory: exactly what the policy saw and produced, as files readable without this project.

Token in, token out: `ids` holds the sampled ids verbatim and is never made again from text (DESIGN §4).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from components.core.errors import UserError
from components.core.files import atomic_folder
from components.judge.verdict import Verdict


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool with its observation; `valid` is False when it did not parse or names no tool."""

    name: str
    arguments: dict[str, Any]
    observation: str
    valid: bool = True
    verdicts: int = 0
    """How many of the trajectory's verdicts this call asked for."""


@dataclass(frozen=True)
class Turn:
    """One assistant message (`text` is decoded for people) and the calls that it made."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    shortened: int = 0
    """So many earlier observations, the oldest, stood shortened in the history that this turn was sampled from."""


@dataclass(frozen=True)
class Trajectory:
    """One episode. Sequences have the length of `ids`; `action_mask` is 1 on the policy's own tokens.

    `sampler_logprob` is the sampler's log-probability (nats) of each own token, 0 elsewhere. `reward` is the milestone
    reward and belongs to the last own token. `finish_reason` is stop, length (a token or context limit), turns, time or
    server (the policy's server failed). A server that speaks text only leaves the sequences empty.
    """

    task_id: str
    ids: tuple[int, ...]
    action_mask: tuple[int, ...]
    sampler_logprob: tuple[float, ...]
    turns: tuple[Turn, ...]
    verdicts: tuple[Verdict, ...]
    """Every verdict in order; the last one is of the final answer and gives the reward."""
    reward: float
    finish_reason: str
    policy_version: str
    """Checkpoint digest and update count that sampled it."""
    files: dict[str, str] = field(default_factory=dict)
    """The candidate's final files by workspace path."""
    error: str = ""
    """Why the policy could not go on, when its server failed."""
    task: str = ""
    """The task's source; with `start` and `settings` the record can be replayed without the data set."""
    start: dict[str, str] = field(default_factory=dict)
    """The candidate's files before the first turn: the starter, where there is one."""
    settings: dict[str, Any] = field(default_factory=dict)
    """`device`, `in_turns` (whether it was a trajectory of several turns) and `context`, the window in tokens."""

    @property
    def final(self) -> Verdict:
        return self.verdicts[-1]


def save_trajectories(folder: Path, trajectories: list[Trajectory]) -> None:
    """Write `trajectories.jsonl` (all but tokens) and `tokens.safetensors` (ids, action_mask, sampler_logprob, offsets)."""
    lines: list[str] = []
    ids: list[int] = []
    mask: list[int] = []
    logprob: list[float] = []
    offsets = [0]
    for trajectory in trajectories:
        record = asdict(trajectory)
        for key in ("ids", "action_mask", "sampler_logprob"):
            del record[key]
        record["verdicts"] = [verdict.model_dump() for verdict in trajectory.verdicts]
        lines.append(json.dumps(record, ensure_ascii=False))
        ids += trajectory.ids
        mask += trajectory.action_mask
        logprob += trajectory.sampler_logprob
        offsets.append(len(ids))
    with atomic_folder(folder) as temporary:
        (temporary / "trajectories.jsonl").write_bytes(
            "".join(line + "\n" for line in lines).encode(errors="backslashreplace")
        )  # JSON's own escapes
        save_file(
            {
                "ids": np.array(ids, dtype=np.int32),
                "action_mask": np.array(mask, dtype=np.uint8),
                "sampler_logprob": np.array(logprob, dtype=np.float32),
                "offsets": np.array(offsets, dtype=np.int64),
            },
            temporary / "tokens.safetensors",
        )


def load_trajectories(folder: Path) -> list[Trajectory]:
    """Read what `save_trajectories` wrote; UserError when the two files disagree."""
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
        sequences = {
            name: tuple(tokens[name][start:end].tolist())
            for name in ("ids", "action_mask", "sampler_logprob")
        }
        try:
            turns = tuple(
                Turn(**(turn | {"calls": tuple(ToolCall(**call) for call in turn["calls"])}))
                for turn in record["turns"]
            )
            verdicts = tuple(Verdict.model_validate(verdict) for verdict in record["verdicts"])
            result.append(Trajectory(**(record | {"turns": turns, "verdicts": verdicts} | sequences)))
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(
                f"{folder / 'trajectories.jsonl'}: line {number} is no trajectory ({error}); restore the file from its run."
            ) from error
    return result
