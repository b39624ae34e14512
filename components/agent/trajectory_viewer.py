"""Show a trajectory to people turn by turn, as lines in a terminal or as one HTML page."""

import difflib
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import StrictUndefined, Template

from components.agent.trajectory import ToolCall, Trajectory
from components.core.errors import refuse
from components.judge.verdict import Verdict

# The text of a call between tags, which is shown as an action instead.
CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Action:
    """One tool call as the viewer shows it.

    `title` is the call's main argument, such as a path or a command. `diff` has the lines of a diff if the
    call changed a file with Write, Edit or MultiEdit, and is empty otherwise. `verdicts` are those that the
    judge gave on the policy's kernel between the end of the previous valid call and the end of this one.
    """

    call: ToolCall
    title: str
    diff: tuple[str, ...]
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Step:
    """One turn, which is one message of the policy, as the viewer shows it.

    `number` counts from 1, `text` is the message without the calls in `<tool_call>` tags, and `actions` are
    its tool calls.
    """

    number: int
    text: str
    actions: tuple[Action, ...]


def choose(trajectories: Sequence[Trajectory], number: int, folder: Path) -> tuple[int, Trajectory]:
    """Return the number, counted from 1, and the trajectory that `number` selects.

    If `number` is 0, the first of the trajectories with the highest reward is selected. Raises UserError if
    there is no such trajectory. `folder`, from which the trajectories were loaded, is named in the message.
    """
    refuse(
        (not trajectories, f"{folder}: it holds no trajectory."),
        (
            not 0 <= number <= len(trajectories),
            f"{folder}: there is no trajectory {number}; it holds {len(trajectories)}.",
        ),
    )
    if number == 0:
        # A trajectory without a reward, because the judge failed on it, comes last.
        rewards = [-math.inf if one.reward is None else one.reward for one in trajectories]
        number = rewards.index(max(rewards)) + 1
    return number, trajectories[number - 1]


def reward_text(trajectory: Trajectory) -> str:
    """Return the reward as text, such as "2", which is "none" if the judge failed on the trajectory."""
    return "none" if trajectory.reward is None else f"{trajectory.reward:g}"


def steps(trajectory: Trajectory) -> list[Step]:
    left = iter(trajectory.verdicts)
    files = dict(trajectory.start)
    found = []
    for number, turn in enumerate(trajectory.turns, 1):
        actions = tuple(
            Action(
                call,
                _title(call),
                diff=tuple(_change(call, files)),
                verdicts=tuple(itertools.islice(left, call.verdicts)),
            )
            for call in turn.calls
        )
        found.append(Step(number, re.sub(r"\n{3,}", "\n\n", CALL.sub("", turn.text)).strip(), actions))
    return found


def _title(call: ToolCall) -> str:
    for key in ("file_path", "command", "pattern", "bash_id", "shell_id"):
        if key in call.arguments:
            return str(call.arguments[key])
    return (
        ""
        if call.name in ("Write", "Edit", "MultiEdit")
        else json.dumps(call.arguments, ensure_ascii=False)[:200]
    )


def _change(call: ToolCall, files: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a diff if the call changed a file, and apply the change to `files`.

    `files` has the texts of the files before the call, by workspace path. The observation of the call, such
    as `Written PATH.`, says whether it changed a file and which.
    """
    path = call.observation.removeprefix("Written ").removeprefix("Edited ").removesuffix(".")
    if call.observation == f"Written {path}.":
        before, after = files.get(path, ""), str(call.arguments.get("content", ""))
        files[path] = after if after.endswith("\n") else f"{after}\n"  # as the tool does
        yield from _diff(before, after)
    elif call.observation == f"Edited {path}.":
        edits = call.arguments.get("edits", [call.arguments])
        for edit in json.loads(edits) if isinstance(edits, str) else edits:
            old, new = str(edit["old_string"]), str(edit["new_string"])
            if path in files:
                files[path] = files[path].replace(old, new)
            yield from _diff(old, new)


def _diff(before: str, after: str) -> Iterator[str]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=3)
    return itertools.islice(lines, 2, None)  # The first two lines are for the names of the files.


def words(verdict: Verdict) -> str:
    """Describe the verdict in one line, such as "correct, 1.52x eager (1.40 to 1.65), milestone 2".

    Each speed-up is followed by its 95 % interval. The milestone is 1 for a correct kernel, 2 if it is also
    faster than eager PyTorch, and 3 if it is also faster than torch.compile. For a kernel that is not
    correct, the line has the status and the reason of the verdict: "build_failed: …".
    """
    if verdict.status != "correct":
        return f"{verdict.status}{f': {verdict.reason}' if verdict.reason else ''}"
    ratios = [f"{r.estimate:.2f}x {name} ({r.low:.2f} to {r.high:.2f})" for name, r in verdict.speedup if r]
    return f"correct, {', '.join(ratios) or 'not measured'}, milestone {verdict.milestone}"


def page(trajectory: Trajectory, name: str) -> str:
    """Return the text of a self-contained HTML page with the heading `name` that shows the trajectory."""
    template: Template = Template(
        Path(__file__).with_name("timeline.html.j2").read_text(),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return template.render(
        name=name,
        trajectory=trajectory,
        reward=reward_text(trajectory),
        steps=steps(trajectory),
        words=words,
        final=words(trajectory.final),
    )


def lines(trajectory: Trajectory) -> Iterator[tuple[str, str]]:
    """Yield the texts that show the trajectory in a terminal, each with its style for the library rich."""
    for step in steps(trajectory):
        yield f"\nturn {step.number}", "bold"
        if step.text:
            yield step.text, ""
        for action in step.actions:
            yield f"  {action.call.name} {action.title}".rstrip(), "cyan" if action.call.valid else "red"
            for line in action.diff:
                yield (
                    f"    {line}",
                    "green" if line.startswith("+") else "red" if line.startswith("-") else "dim",
                )
            yield from ((f"    {line}", "dim") for line in action.call.observation.splitlines())
            yield from (
                (f"    = {words(verdict)}", "bold green" if verdict.status == "correct" else "bold red")
                for verdict in action.verdicts
            )
    yield (
        f"\nended by {trajectory.finish_reason}{f': {trajectory.error}' if trajectory.error else ''}",
        "bold",
    )
    yield f"final answer: {words(trajectory.final)}; reward {reward_text(trajectory)}", "bold"
