"""Define the trajectory, which is the record of one attempt of a policy at a task, and its files on disk.

A trajectory has all turns of the attempt, the observations (what tool calls returned), and the verdicts of
the judge. `Trajectory.ids` holds the token ids of the prompt, of the sampled turns and of the observations.
The ids of the turns are those that the policy sampled; they are never computed from text again, because
encoding a text can give other tokens.
"""

import itertools
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from components.core.errors import UserError
from components.core.files import atomic_folder
from components.judge.verdict import Verdict

SEQUENCES: dict[str, type] = {"ids": np.int32, "action_mask": np.uint8, "sampler_logprob": np.float32}


@dataclass(frozen=True)
class ToolCall:
    """One call of the tool `name`, with its observation, the text that the policy gets as the answer.

    `arguments` are the arguments by name. `valid` is False if the call could not be parsed or its arguments
    do not fit the tool. `verdicts` is the number of verdicts (results of the judge, which builds, checks and
    times the policy's kernel) that were given between the end of the previous valid call and the end of this
    one, some of them perhaps to commands in the background. `Trajectory.verdicts` begins with these verdicts,
    in the order of the calls.
    """

    name: str
    arguments: dict[str, Any]
    observation: str
    valid: bool = True
    verdicts: int = 0


@dataclass(frozen=True)
class Turn:
    """One message of the policy, decoded as `text`, and its tool calls.

    `shortened` counts what was shortened in the history from which the message was sampled: for a policy that
    is sampled as token ids, the earlier turns whose observations were shortened, and for a chat server, the
    earlier messages with observations that were shortened.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    shortened: int = 0


@dataclass(frozen=True)
class Trajectory:
    """Record of one episode, which is one attempt of a policy at a task.

    `task_id` is the id of the task. `ids`, `action_mask` and `sampler_logprob` have one entry for each token
    and are empty if the policy is a chat server. `action_mask` is 1 on the tokens that the policy sampled.
    `sampler_logprob` is the log-probability of these tokens in nats and 0 on all other tokens.
    `policy_version` names the policy's weights; if they changed during the episode, it names the latest.
    `versions` lists the names of all weights that sampled tokens, in order, each with its number of tokens.

    `verdicts` are all verdicts of the episode in order. A verdict is the judge's result for the candidate,
    which is the policy's implementation of the task. The last verdict is on the candidate's files at the end,
    or its status is `infrastructure`, because the judge failed during or after the last turn. `reward` is
    what the function that the parameter `reward` names gave, and None if the judge failed. `finish_reason` is
    stop (the last turn has no tool call), length (a token or context limit), turns (the limit of turns), time
    (the deadline), server (the policy's server failed) or judge (the judge failed when a tool call needed it,
    so this call and those after it are missing in the last turn). `error` says why a server or the judge
    failed.

    `files` are the candidate's files at the end by workspace path, and `start` are its files before the first
    turn. `task` is the source of the task. `settings` has the keys `device`, `in_turns` (whether several
    turns were allowed) and `context` (window in tokens). Because of `task` and `settings`, a trajectory can
    be judged again without its data set.
    """

    task_id: str
    ids: Sequence[int]
    action_mask: Sequence[int]
    sampler_logprob: Sequence[float]
    turns: tuple[Turn, ...]
    verdicts: tuple[Verdict, ...]
    reward: float | None
    finish_reason: str
    policy_version: str
    files: dict[str, str] = field(default_factory=dict)
    error: str = ""
    task: str = ""
    start: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        # Tuples of numbers would take ten times the memory of arrays, whose type is that of the file.
        for name, dtype in SEQUENCES.items():
            given: NDArray[Any] = np.asarray(getattr(self, name), dtype)
            object.__setattr__(self, name, array(given.dtype.char, given.tobytes()))

    @property
    def final(self) -> Verdict:
        return self.verdicts[-1]

    @property
    def is_judged(self) -> bool:
        """Return whether the judge did not fail, so that the final verdict is one on the policy's kernel."""
        return self.final.status != "infrastructure"

    @property
    def earned(self) -> float:
        """Return the reward of the trajectory; raise AssertionError if the judge failed on it."""
        assert self.reward is not None, f"the judge failed on a trajectory of task {self.task_id}"
        return self.reward


def updates_of(version: str) -> int:
    """Return the number of steps that the weights named `version` were trained, such as 3 for 0123+3.

    The result is 0 if `version` has no plus sign, or if the part after the last one is not a number.
    """
    _, sign, number = version.rpartition("+")
    return int(number) if sign and number.isdigit() else 0


@dataclass(frozen=True)
class TokenFile:
    """Token sequences of all trajectories in tokens.safetensors, mapped into memory.

    Each sequence has one entry for each token; trajectory i has the entries offsets[i] to offsets[i + 1].
    `action_mask` is 1 on sampled tokens, and `sampler_logprob` is in nats. `offsets` is [trajectories + 1].
    """

    ids: NDArray[np.int32]
    action_mask: NDArray[np.uint8]
    sampler_logprob: NDArray[np.float32]
    offsets: NDArray[np.int64]

    def span(self, index: int) -> slice:
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))


def save_trajectories(folder: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write trajectories to trajectories.jsonl and tokens.safetensors in `folder`.

    trajectories.jsonl has one line for each trajectory, without the sequences of tokens. tokens.safetensors
    has the sequences of all trajectories one after the other, and the `offsets` at which each trajectory
    begins. `folder` is replaced as a whole, in one step.
    """
    lines = []
    for trajectory in trajectories:
        record = {key: value for key, value in asdict(trajectory).items() if key not in SEQUENCES}
        record["verdicts"] = [verdict.model_dump() for verdict in trajectory.verdicts]
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    tokens: dict[str, Any] = {
        name: np.concatenate(
            [np.zeros(0, dtype), *(np.asarray(getattr(one, name), dtype) for one in trajectories)]
        )
        for name, dtype in SEQUENCES.items()
    }
    offsets = list(itertools.accumulate((len(trajectory.ids) for trajectory in trajectories), initial=0))
    with atomic_folder(folder) as temporary:
        # A lone surrogate cannot be encoded as UTF-8, so it is written as an escape sequence of JSON.
        (temporary / "trajectories.jsonl").write_bytes("".join(lines).encode(errors="backslashreplace"))
        save_file(tokens | {"offsets": np.array(offsets, dtype=np.int64)}, temporary / "tokens.safetensors")


def load_tokens(folder: Path) -> TokenFile:
    """Return the token sequences of a folder that `save_trajectories` has written, mapped into memory.

    Raises UserError if tokens.safetensors is missing or damaged.
    """
    from safetensors.torch import load_file  # maps the file, which the numpy version reads

    try:
        tensors = load_file(folder / "tokens.safetensors")
        return TokenFile(**{name: tensor.numpy() for name, tensor in tensors.items()})
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise UserError(
            f"{folder}: not a folder of trajectories ({error}); give one that a stage wrote."
        ) from error


def read_records(folder: Path, tokens: TokenFile) -> Iterator[dict[str, Any]]:
    """Yield the lines of trajectories.jsonl as JSON objects, one for each trajectory of `tokens`.

    Raises UserError if the file is missing or damaged, or if the number of its lines or the number of tokens
    in `tokens` disagrees with `tokens.offsets`.
    """
    lines = 0
    try:
        with (folder / "trajectories.jsonl").open(encoding="utf-8") as file:
            for line in file:
                lines += 1
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: not a folder of trajectories ({error}); give one that a stage wrote."
        ) from error
    if len(tokens.offsets) != lines + 1 or tokens.offsets[-1] != len(tokens.ids):
        raise UserError(
            f"{folder}: trajectories.jsonl and tokens.safetensors disagree; restore both from the same run."
        )


def load_trajectories(folder: Path) -> list[Trajectory]:
    """Read all trajectories that `save_trajectories` has written to `folder` or to folders below it.

    They are in the order of their folders' paths. Raises UserError if there is no trajectories.jsonl, if a
    file is missing or damaged, or if the files do not fit each other.
    """
    places = trajectory_folders(folder) or [folder]
    return [trajectory for place in places for trajectory in _load(place)]


def trajectory_folders(root: Path) -> list[Path]:
    """Return the folders with trajectories at or below the folder `root`, in the order of their paths.

    Folders whose names begin with a dot are left out with what is below them. A process that was killed while
    it wrote them leaves such folders (`atomic_folder`), whose files may not be complete.
    """
    found = {file.parent for file in root.rglob("trajectories.jsonl")}
    return sorted(
        place for place in found if not any(part.startswith(".") for part in place.relative_to(root).parts)
    )


def _load(folder: Path) -> Iterator[Trajectory]:
    """Yield the trajectories in `folder` itself. Raises UserError as `load_trajectories` does."""
    tokens = load_tokens(folder)
    for index, record in enumerate(list(read_records(folder, tokens))):
        sequences = {name: getattr(tokens, name)[tokens.span(index)] for name in SEQUENCES}
        try:
            lists: dict[str, Any] = {
                "turns": tuple(
                    Turn(**(turn | {"calls": tuple(ToolCall(**call) for call in turn["calls"])}))
                    for turn in record["turns"]
                ),
                "verdicts": tuple(Verdict.model_validate(verdict) for verdict in record["verdicts"]),
                "versions": tuple((name, count) for name, count in record.get("versions", ())),
            }
            yield Trajectory(**(record | lists | sequences))
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(
                f"{folder / 'trajectories.jsonl'}: line {index + 1} is no trajectory ({error}); restore the "
                "file from its run."
            ) from error
