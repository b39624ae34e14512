"""The prompt of a policy, which is one user message for each kernel task.

A kernel task is a PyTorch module for which the policy writes a faster kernel.
"""

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
    """Return the instructions in agent_workdir/SKILL.md, which say how a policy writes a kernel.

    The YAML frontmatter of the file is left out.
    """
    file = PROJECT / "agent_workdir" / "SKILL.md"
    return re.sub(r"\A---\n.*?\n---\n+", "", file.read_text(), flags=re.DOTALL)


def user_message(policy: Policy, code: str, *, in_turns: bool, device: Device) -> str:
    """Return the content of the user message for a task with the source `code`.

    A task is a PyTorch module for which the policy writes a faster kernel. If `policy.prompt` is `compact`,
    the message is the source itself. Otherwise the message has the text of SKILL.md, the device and the
    source. If `in_turns` is true, the message ends with the instruction to work in several turns (IN_TURNS).
    If it is false, a message that is not compact ends with the instruction to answer in one turn.
    """
    if policy.prompt == "compact":
        return code + IN_TURNS if in_turns else code
    return task_message(code, device) + (
        IN_TURNS if in_turns else "\nAnswer with the final files in one turn.\n"
    )


def workloads_section(code: str, evidence: Mapping[str, Any]) -> str:
    """Return a section for the instructions in SKILL.md that lists the workloads of a task, or "".

    Workloads are the calls that make the inputs of the task, for instance `get_inputs(32, 128)`; the result
    is "" if the source `code` of the task names none. `evidence` is the record of the check with which the
    judge admitted the task, or empty. If its list `workloads` has the shapes of the inputs, they are added.
    Raises UserError if the source names workloads but is not valid Python, or names them in a wrong form.
    """
    calls = [workload.call for workload in workloads_of(code, "model.py")]
    if calls == [""]:
        return ""
    shapes = [
        ": " + ", ".join(f"{form['dtype']} {form['shape']}" for form in one["inputs"])
        for one in evidence.get("workloads", ())
    ]
    return (
        "\n## The workloads of this task\n\n"
        "These calls make the inputs, and the kernel is checked and timed on each of them:\n\n"
        + "".join(f"- `{call}`{shape}\n" for call, shape in zip_longest(calls, shapes, fillvalue=""))
    )


def task_message(code: str, device: Device) -> str:
    """Return the instructions for a task whose source is `code`, as one text.

    They are the text of SKILL.md (`skill`), the calls that make the task's inputs if the source names several
    (`workloads_section`), the device for which a kernel is to be written, and the source.
    """
    return (
        f"{skill()}{workloads_section(code, {})}\n\nThe device is {KERNELS[device]}. "
        f"The task, model.py:\n```python\n{code.rstrip()}\n```\n"
    )
