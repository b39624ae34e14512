"""Export of kernel tasks as Harbor tasks, whose test gets a verdict from the judge's HTTP service.

Harbor is a form of tasks for agents in containers: a folder with `instruction.md`, `task.toml`, the files of
the container in `environment/`, and `tests/test.sh`, which writes the reward. The exported test runs in a
container of its own, into which only the candidate's files are copied, so the agent cannot touch it. The test
requests a new measurement of the candidate, with a token that the agent does not have.
"""

import json
import re
from pathlib import Path

from components.agent.workspace import TEMPLATE, starter
from components.core.config import PROJECT
from components.core.errors import UserError
from components.core.files import write_changed
from components.core.param_types import Device
from components.core.task import KernelTask
from components.policy.prompts import KERNELS, skill

ORGANISATION = "cuda-agent"
SCRIPTS = PROJECT / "components" / "service" / "harbor_task"
# Folder in the container in which the agent works.
WORKDIR = "/app"
# Time limits in seconds: of the agent's work, and of a judgement with its wait in the queue.
AGENT_SECONDS, VERIFIER_SECONDS = 3600, 1800
EXAMPLE = {"cpu": "forward.cpp", "cuda": "forward.cu"}
# Contents of model_new.py for a task for which `starter` returns None.
EMPTY = '"""Write class ModelNew here; example_model_new.py has the form."""\n'
# Passages of SKILL.md about the utilities of a workspace, and their replacements for a container.
PASSAGES = {
    "`binding.cpp`, `utils/`": "`binding.cpp`, `judge.py`",
    "`bash utils/compile.sh && python3 -m utils.verification && python3 -m utils.profiling`": (
        "`python3 judge.py`, which has the files built, checked and timed"
    ),
    "`kernels/forward.cu` of the template is an example": "`example_forward.cu` is an example, on cuda",
    "The shell has no network and no GPU: only the three commands build for the device and measure on it.": (
        "The judge builds for its own device and measures on it, whatever the container has."
    ),
}


def export_tasks(
    tasks: list[KernelTask], folder: Path, *, device: Device, service: str, image: str
) -> list[Path]:
    """Write a Harbor task for each of `tasks` to a folder below `folder`, and return the new folders.

    `service` is the judge's address as the containers reach it. `image` is the containers' image, which needs
    Python 3.9 and bash. Environment variables of Harbor's process change what the containers use:
    CUDA_AGENT_JUDGE replaces `service`, and CUDA_AGENT_TOKEN and CUDA_AGENT_TEST_TOKEN are the tokens of the
    agent and of the test, which a service without tokens does not need. Other files in the folders, such as a
    solution, are kept. Raises UserError if `folder` is a file.
    """
    names = {f"{_slug(task.name)}-{task.task_id}": task for task in tasks}
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: not a folder; give another one for the tasks.")
    for name, task in names.items():
        _write(folder / name, name, task, device, service, image)
    return [folder / name for name in names]


def instruction(task: KernelTask, device: Device) -> str:
    """Return the text that an agent gets: SKILL.md, adapted to a container, and the task's source."""
    text = skill()
    for passage, replacement in PASSAGES.items():
        text = text.replace(passage, replacement)
    return (
        f"{text}\n\nYou work in {WORKDIR}; example_model_new.py and example_{EXAMPLE[device]} there answer "
        f"another task. The device is {KERNELS[device]}. The task, model.py:\n"
        f"```python\n{task.code.rstrip()}\n```\n"
    )


def _write(folder: Path, name: str, task: KernelTask, device: Device, service: str, image: str) -> None:
    example = EXAMPLE[device]
    texts = {
        "instruction.md": instruction(task, device),
        "task.toml": _settings(name, task, device, service, image),
        "environment/model.py": task.code,
        "environment/model_new.py": starter(task) or EMPTY,
        "environment/kernels/.keep": "",  # the folder is copied to the test, and must exist
        "environment/example_model_new.py": (TEMPLATE / "model_new.py").read_text(),
        f"environment/example_{example}": (TEMPLATE / "kernels" / example).read_text(),
        "environment/judge.py": (SCRIPTS / "judge.py").read_text(),
        "tests/model.py": task.code,
        "tests/judge.py": (SCRIPTS / "judge.py").read_text(),
        "tests/test.sh": (SCRIPTS / "test.sh").read_text(),
    }
    for header in ("binding_registry.h", "vec.h", "binding.cpp"):
        texts[f"environment/{header}"] = (TEMPLATE / header).read_text()
    for path, text in texts.items():
        write_changed(folder / path, text)
    (folder / "tests" / "test.sh").chmod(0o755)


def _settings(name: str, task: KernelTask, device: Device, service: str, image: str) -> str:
    """Return the text of task.toml; strings are written as in JSON, because TOML reads this form too."""
    judge = f"CUDA_AGENT_JUDGE = {json.dumps(f'${{CUDA_AGENT_JUDGE:-{service}}}')}"
    level = f"level = {task.level}\n" if task.level is not None else ""
    return f"""\
schema_version = "1.4"
artifacts = ["{WORKDIR}/model_new.py", "{WORKDIR}/kernels"]

[task]
name = "{ORGANISATION}/{name}"
description = "Write a kernel that makes a PyTorch module faster; the reward is -1, 1, 2 or 3."

[metadata]
category = "kernels"
device = "{device}"
task_id = "{task.task_id}"
operators = {json.dumps(task.ops)}
{level}
[agent]
timeout_sec = {AGENT_SECONDS}

[environment]
docker_image = {json.dumps(image)}
workdir = "{WORKDIR}"

[environment.env]
{judge}
CUDA_AGENT_TOKEN = "${{CUDA_AGENT_TOKEN:-}}"

[verifier]
environment_mode = "separate"
timeout_sec = {VERIFIER_SECONDS}

[verifier.env]
{judge}
CUDA_AGENT_TOKEN = "${{CUDA_AGENT_TEST_TOKEN:-}}"
"""


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60] or "task"
