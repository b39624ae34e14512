"""Tasks that are cast to half precision, however they are written, and the starters of such tasks."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from components.agent.workspace import Workspace
from components.core.config import resolve
from components.core.params import Params
from components.core.records import TaskDtype
from components.core.task import KernelTask, cast_task, dtype_of
from components.evaluation.suites import load_suite
from components.judge.screen import screen_python


def suite_params(suite: str) -> Params:
    params = resolve("ci").params
    return params.model_copy(update={"evaluation": params.evaluation.model_copy(update={"suite": suite})})


CAST_TASK = """import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, size):
        super(Model, self).__init__()
        self.linear = nn.Linear(size, 3)
        self.register_buffer("steps", torch.arange(3))  # § stays an integer

    def forward(self, x, index, factor):
        return (self.linear(x) + self.steps)[index] * factor


def get_inputs():
    return [torch.rand(4, 8), torch.randint(0, 4, (5,)), 2.0]


def get_init_inputs():
    return [8]
"""


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_suite_in_another_dtype_casts_modules_and_inputs(dtype: TaskDtype, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(CAST_TASK)
    params = resolve("ci", (f"evaluation.suite={tmp_path}", f"evaluation.dtype={dtype}")).params
    (task,) = load_suite(params, tmp_path)
    namespace: dict[str, Any] = {}
    exec(task.code, namespace)
    model, inputs = namespace["Model"](*namespace["get_init_inputs"]()), namespace["get_inputs"]()
    half = getattr(torch, dtype)
    assert [inputs[0].dtype, inputs[1].dtype, inputs[2]] == [half, torch.int64, 2.0]
    assert [value.dtype for value in model.state_dict().values()] == [torch.int64, half, half]
    assert model(*inputs).dtype == half and dtype_of(task.code) == dtype
    (unchanged,) = load_suite(suite_params(str(tmp_path)), tmp_path)
    assert unchanged.code == CAST_TASK and unchanged.task_id != task.task_id


CONSTRUCTORS = {
    "usual": "    def __init__(self):\n        super().__init__()\n        self.line = nn.Linear(3, 3)\n\n",
    "one_line": "    def __init__(self): super().__init__()\n\n",
    "none": "",
    "returns": "    def __init__(self):\n        super().__init__()\n        self.line = nn.Linear(3, 3)\n"
    "        if self.line.bias is not None:\n            return\n\n",
}
RETURNS = {
    "list": "    return [torch.randn(3)]",
    "tuple": "    return torch.randn(3), 3",
    "choice": "    return [torch.randn(3)] if N else [torch.randn(4)]",
    "nested": "    def f():\n        return torch.randn(3)\n    return [f()]",
}


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
@pytest.mark.parametrize("returned", RETURNS)
def test_a_task_and_its_starter_are_cast_however_it_is_written(
    constructor: str, returned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import torch\nfrom torch import nn\nN = 1\nclass Model(nn.Module):\n"
        f"{CONSTRUCTORS[constructor]}    def forward(self, x):\n        return x\n\n\n"
        f"def get_inputs():\n{RETURNS[returned]}\n\n\ndef get_init_inputs():\n    return []\n"
    )
    task = cast_task(KernelTask(code=code), "float16")
    namespace: dict[str, Any] = {}
    exec(task.code, namespace)
    tensors = [namespace["get_inputs"]()[0], *namespace["Model"]().parameters()]
    assert {tensor.dtype for tensor in tensors} == {torch.float16} and dtype_of(task.code) == "float16"
    names = ["line.weight", "line.bias"] if "Linear" in CONSTRUCTORS[constructor] else []
    shape = {"shape": [2], "dtype": "float16"}
    evidence = {"inputs": [shape], "outputs": [shape], "parameters": names}
    starter = Workspace(task.model_copy(update={"evidence": evidence})).files["model_new.py"]
    assert screen_python(starter) is None
    monkeypatch.setitem(sys.modules, "cuda_extension", types.ModuleType("cuda_extension"))
    exec(starter, namespace)
    assert [value.dtype for value in namespace["ModelNew"]().parameters()] == [torch.float16] * len(names)
