"""The prompt of a policy, which is one user message for each task."""

import re
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from components.core.config import PROJECT
from components.core.params import Policy
from components.core.records import Device
from components.core.workloads import workloads_of

# End of the prompt of an episode with several turns. A compact prompt without this end is that of an episode
# with one turn.
IN_TURNS = "\nWork in turns: measure, repair, make it faster.\n"
# Description of each device in a prompt that is not compact.
KERNELS = {"cpu": "cpu: C++ in kernels/*.cpp, one thread", "cuda": "cuda: CUDA in kernels/*.cu"}


def skill() -> str:
    """Return agent_workdir/SKILL.md, which says how a kernel is written, without its YAML frontmatter."""
    text = (PROJECT / "agent_workdir" / "SKILL.md").read_text()
    return re.sub(r"\A---\n.*?\n---\n+", "", text, flags=re.DOTALL)


def user_message(policy: Policy, code: str, *, in_turns: bool, device: Device) -> str:
    """Return the content of the user message for a task with the source `code`.

    If `policy.prompt` is `compact`, the message is the source itself. Otherwise the message has the text of
    SKILL.md, the device and the source. If `in_turns` is true, the message ends with the instruction to work
    in several turns (IN_TURNS). If it is false, a message that is not compact ends with the instruction to
    answer in one turn.
    """
    if policy.prompt == "compact":
        return code + IN_TURNS if in_turns else code
    ending = IN_TURNS if in_turns else "\nAnswer with the final files in one turn.\n"
    return task_message(code, device) + ending


def workloads_section(code: str, evidence: Mapping[str, Any]) -> str:
    """Return the last section of SKILL.md for a task with the source `code`: the calls that make its inputs.

    Such calls, for instance `get_inputs(32, 128)`, are the task's workloads; if it names none, the result is
    "". `evidence` is the record of the check with which the judge admitted the task. The shapes of the inputs
    are added if the list `workloads` in it has them. Raises UserError if the source is not valid.
    """
    calls = [workload.call for workload in workloads_of(code, "model.py")]
    if calls == [""]:
        return ""
    shapes = [
        ": " + ", ".join(f"{form['dtype']} {form['shape']}" for form in one["inputs"])
        for one in evidence.get("workloads", ())
    ]
    lines = [f"- `{call}`{shape}\n" for call, shape in zip_longest(calls, shapes, fillvalue="")]
    return (
        "\n## The workloads of this task\n\n"
        "These calls make the inputs, and the kernel is checked and timed on each of them:\n\n"
        + "".join(lines)
    )


def task_message(code: str, device: Device) -> str:
    """Return SKILL.md (`skill`) with the task's workloads, the device and the source `code` of a task."""
    return (
        f"{skill()}{workloads_section(code, {})}\n\nThe device is {KERNELS[device]}. "
        f"The task, model.py:\n```python\n{code.rstrip()}\n```\n"
    )
