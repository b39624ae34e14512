"""Composed tasks as people write them: the same computation, and the way back to the layout that is read."""

import itertools
import random
from typing import Any

import torch

from components.bootstrap.source_names import plain_layout
from components.bootstrap.tensor_operators import read_program
from components.core.config import resolve
from components.synthesis import tensor_composer
from components.synthesis.core_composer import compose_tasks
from components.synthesis.source_style import restyle

SETS = ("data.operators=kernelbench", "data.numel=[256, 16384]", "data.eager_seconds=[1e-7, 0.01]")
PARAMS = resolve("ci", SETS).params


def outcome(code: str) -> tuple[list[tuple[int, ...]], torch.Tensor]:
    """The shapes of the parameters, and the output on the inputs of a fixed seed."""
    space: dict[str, Any] = {}
    exec(code, space)
    torch.manual_seed(0)
    model = space["Model"](*space["get_init_inputs"]())
    return [tuple(value.shape) for value in model.state_dict().values()], model(*space["get_inputs"]())


def test_a_task_in_the_style_computes_the_same_and_is_read_as_the_same(monkeypatch: Any) -> None:
    monkeypatch.setattr(tensor_composer, "restyle", lambda code, ops, rng: code)
    for number, task in enumerate(itertools.islice(compose_tasks(3, PARAMS.data), 60)):
        styled = restyle(task.code, task.ops, random.Random(number))
        (shapes, output), (styled_shapes, styled_output) = outcome(task.code), outcome(styled)
        assert styled_shapes == shapes
        torch.testing.assert_close(styled_output, output, rtol=0, atol=0, equal_nan=True)
        plain, program, same = plain_layout(styled), read_program(task.code), read_program(styled)
        assert plain is not None and outcome(plain)[0] == shapes
        assert program is not None and same is not None and len(same.tensors) == len(program.tensors)
        assert same.shape == program.shape and len(same.parts) == len(program.parts)
        assert styled == restyle(task.code, task.ops, random.Random(number))


def test_composed_tasks_name_sizes_and_arguments_and_have_docstrings() -> None:
    codes = [task.code for task in itertools.islice(compose_tasks(5, PARAMS.data), 40)]
    for text in ('"""', "super(Model, self)", "torch.Tensor", "self.dim", "batch_size = ", "__init__(self, "):
        assert any(text in code for code in codes), text


PEOPLE = '''
import torch
import torch.nn as nn

class Model(nn.Module):
    """A reduction."""
    def __init__(self, dim: int, keep=True):
        super(Model, self).__init__()
        self.dim = dim

    def forward(self, A: torch.Tensor) -> torch.Tensor:
        """Args: A of shape (batch, n)."""
        A = torch.sigmoid(A)
        return torch.sum(A, dim=self.dim, keepdim=True)

batch, n = 4, 2 ** 3
axis = 1

def get_inputs():
    A = torch.rand(batch, 8)
    return [A]

def get_init_inputs():
    return [axis]
'''


def test_sources_of_people_are_read_and_those_with_branches_are_not() -> None:
    program = read_program(PEOPLE)
    assert program is not None and program.shape == (4, 8) and program.tensors == ("x", "out")
    assert plain_layout(PEOPLE.replace("        return torch.sum", "        if A: return torch.sum")) is None
    assert plain_layout(PEOPLE.replace("A = torch.sigmoid(A)", "B = torch.sigmoid(A)")) is None
    assert plain_layout(PEOPLE.replace("class Model", "class Other")) is None
