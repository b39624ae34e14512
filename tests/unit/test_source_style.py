"""Composed tasks as people write them: the same computation, and the way back to the layout that is read."""

import itertools
import random
from typing import Any

import pytest
import torch

from components.agent.episode import first_prompt
from components.bootstrap.canonicalize import canonicalize
from components.bootstrap.demonstrations import make_demonstration
from components.bootstrap.loop_nest import Line
from components.bootstrap.source_names import plain_layout
from components.bootstrap.tensor_operators import SPELLINGS, read_program
from components.core.config import resolve
from components.policy.prompts import IN_TURNS
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
        plain, program, same = plain_layout(styled, SPELLINGS), read_program(task.code), read_program(styled)
        # The line that keeps a result is none of torch.
        assert plain is not None and ("keep" in task.ops or outcome(plain)[0] == shapes)
        assert program is not None and same is not None and len(same.tensors) == len(program.tensors)
        assert same.shape == program.shape and len(same.parts) == len(program.parts)
        assert canonicalize(styled) == canonicalize(task.code)
        assert styled == restyle(task.code, task.ops, random.Random(number))


def test_a_demonstration_has_the_prompt_of_an_episode() -> None:
    rng, rewritten = random.Random(0), 0
    for composed in itertools.islice(compose_tasks(7, PARAMS.data), 80):
        said = make_demonstration(composed, rng, PARAMS.coldstart, "cpu")[0]["content"]
        in_turns = said.endswith(IN_TURNS)
        assert said == first_prompt(PARAMS, composed.code, in_turns=in_turns)
        rewritten += composed.code not in said
    assert rewritten == 80


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

batch, n = 4, 2 * 2 ** (1 + 1)
axis = 1

def get_inputs():
    A = torch.rand(batch, n)
    return [A]

def get_init_inputs():
    return [axis]
'''


def test_sources_of_people_are_read_and_those_with_branches_are_not() -> None:
    program = read_program(PEOPLE)
    assert program is not None and program.shape == (4, 8) and program.tensors == ("x", "out")
    assert (
        plain_layout(PEOPLE.replace("        return torch.sum", "        if A: return torch.sum"), SPELLINGS)
        is None
    )
    assert plain_layout(PEOPLE.replace("class Model", "class Other"), SPELLINGS) is None


NORM = "x / torch.norm(x, p=2, dim=1, keepdim=True)"


def task(lines: str, init: str = "") -> str:
    return (
        f"import torch\nimport torch.nn as nn\n\nclass Model(nn.Module):\n    def __init__(self):\n        "
        f"super().__init__()\n{init}\n    def forward(self, x, y):\n{lines}\n        return x\n\ndef "
        "get_inputs():\n    return [torch.rand(8, 6, 16, 16), torch.rand(8, 6, 16, 16)]\n"
    )


@pytest.mark.parametrize(
    ("written", "spelled"),
    [
        ("torch.relu(x)", "F.relu(x)"),
        ("x.sigmoid()", "torch.sigmoid(x)"),
        ("torch.nn.functional.gelu(x)", "F.gelu(x)"),
        ("F.leaky_relu(x)", "F.leaky_relu(x, 0.01)"),
        ("F.leaky_relu(x, negative_slope=0.2)", "F.leaky_relu(x, 0.2)"),
        ("torch.clamp(x, min=-1.0, max=1.0)", "torch.clamp(x, -1.0, 1.0)"),
        ("torch.clamp(x, min=0.5)", "torch.clamp(x, min=0.5)"),
        ("F.elu(x, alpha=1)", "F.elu(x)"),
        ("F.hardtanh(x)", "F.hardtanh(x, min_val=-1.0, max_val=1.0)"),
        ("F.hardtanh(x, -2, 2)", "F.hardtanh(x, min_val=-2, max_val=2)"),
        ("F.elu(x, 0.5, True)", "F.elu(x, 0.5, True)"),
        ("torch.min(x, torch.tensor(0.5, device=x.device))", "torch.clamp(x, max=0.5)"),
        ("torch.max(x, self.limit)", "torch.maximum(x, self.limit)"),
        ("torch.max(x, torch.zeros(1))", "torch.maximum(x, torch.zeros(1))"),
        ("x @ y", "torch.matmul(x, y)"),
        ("torch.einsum('bij,jk->bik', x, y)", "torch.matmul(x, y)"),
        ("2 * x", "x * 2"),
        ("y + x", "x + y"),
        ("torch.mul(x, 3.0)", "x * 3.0"),
        ("x + x", "x * 2.0"),
        ("self.limit * x", "x * self.limit"),
        ("x.unsqueeze(1)", "torch.unsqueeze(x, 1)"),
        ("self.drop(F.relu(x))", "F.relu(x)"),
        (
            "0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))",
            'F.gelu(x, approximate="tanh")',
        ),
        ("torch.sum(x, 1)", "torch.sum(x, dim=1, keepdim=False)"),
        ("x.mean(dim=(2, 3), keepdim=True)", "torch.mean(x, dim=(2, 3), keepdim=True)"),
        ("torch.max(x, dim=1).values", "torch.max(x, dim=1, keepdim=False)[0]"),
        ("torch.matmul(x.T, y)", "torch.matmul(x.transpose(0, 1), y)"),
        ("torch.bmm(x, y)", "torch.matmul(x, y)"),
        ("x * torch.sigmoid(x)", "F.silu(x)"),
        ("F.max_pool2d(x, 2)", "F.max_pool2d(x, kernel_size=2, stride=2, padding=0, dilation=1)"),
        ("self.act(x)", "F.leaky_relu(x, 0.3)"),
        ("self.pool(x)", "F.avg_pool2d(x, kernel_size=3, stride=2, padding=0)"),
        ("self.soft(x)", "torch.softmax(x, dim=1)"),
        ("torch.fft.rfft(x)", "torch.fft.rfft(x)"),
    ],
)
def test_calls_are_spelled_as_the_lines_of_the_operators(written: str, spelled: str) -> None:
    init = """        self.act = nn.LeakyReLU(0.3)
        self.pool = nn.AvgPool2d(3, stride=2)
        self.soft = torch.nn.Softmax(dim=1)
        self.drop = nn.Dropout(0.2)
        self.limit = nn.Parameter(torch.tensor(1.0))
"""
    plain = plain_layout(task(f"        x = {written}", init), SPELLINGS)
    assert plain is not None and f"        x = {spelled}\n" in plain


@pytest.mark.parametrize(
    ("written", "spelled"),
    [
        (
            "nn.Conv2d(6, 8, kernel_size=3)",
            "nn.Conv2d(6, 8, 3, stride=1, padding=0, dilation=1, groups=1, bias=True)",
        ),
        ("nn.GroupNorm(num_groups=2, num_channels=6)", "nn.GroupNorm(2, 6)"),
        ("nn.BatchNorm2d(num_features=6)", "nn.BatchNorm2d(6)"),
        ("nn.BatchNorm2d(6, affine=False)", "nn.BatchNorm2d(6, affine=False)"),
        ("nn.Linear(16, 4)", "nn.Linear(16, 4, bias=True)"),
        ("nn.Parameter(torch.randn(6, 1, 1))", "nn.Parameter(torch.randn((6, 1, 1)))"),
        ("nn.Parameter(torch.zeros(6) * 0.02)", "nn.Parameter(torch.randn(6))"),
        ("nn.Parameter(torch.tensor(0.5))", "nn.Parameter(torch.randn(()))"),
    ],
)
def test_constructors_are_spelled_with_the_arguments_that_vary(written: str, spelled: str) -> None:
    plain = plain_layout(task("        x = self.part(x)", f"        self.part = {written}\n"), SPELLINGS)
    assert plain is not None and f"        self.part = {spelled}\n" in plain


@pytest.mark.parametrize(
    ("lines", "plain"),
    [
        ("        x = torch.tanh(F.gelu(x) * y)", ["F.gelu(x)", "x * y", "torch.tanh(x)"]),
        ("        return F.relu(x * 2.0 + 1.0)", ["x * 2.0", "x + 1.0", "F.relu(x)"]),
        ("        a = F.relu(x)\n        b = a * y\n        return b", ["F.relu(x)", "x * y"]),
        ("        x = torch.cumsum(x * y, dim=1)", ["torch.cumsum(x * y, dim=1)"]),
        ("        x = torch.cumsum(x, dim=1) - x", ["torch.cumsum(x, dim=1) - x"]),
        ("        x = x / torch.norm(x)", ["x / torch.norm(x)"]),
        ("        norm = x.norm(dim=1, keepdim=True)\n        return x / norm", [NORM]),
        ("        x = F.relu(x) + x", ["keep(x, 0)", "F.relu(x)", "x + kept_0"]),
        ("        a = torch.tanh(x)\n        return x / a", ["keep(x, 0)", "torch.tanh(x)", "kept_0 / x"]),
        (
            "        a = x.clone().detach()\n        x = F.relu(x)\n        return x * a + a",
            ["keep(x, 0)", "F.relu(x)", "x * kept_0", "x + kept_0"],
        ),
        (
            "        a = F.relu(x)\n        b = torch.tanh(x)\n        c = b * y\n        return c - a",
            ["keep(x, 0)", "F.relu(x)", "keep(x, 1)", "kept_0", "torch.tanh(x)", "x * y", "x - kept_1"],
        ),
        (
            "        a = torch.tanh(x)\n        b = F.gelu(a)\n        c = F.relu(a)\n        return b * c",
            ["torch.tanh(x)", "keep(x, 0)", "F.gelu(x)", "keep(x, 1)", "kept_0", "F.relu(x)", "x * kept_1"],
        ),
        (
            "        return F.silu(x + 1.0) * F.gelu(x)",
            *[["keep(x, 0)", "x + 1.0", "F.silu(x)", "keep(x, 1)", "kept_0", "F.gelu(x)", "x * kept_1"]],
        ),
        (f"        x = F.relu(x)\n        n = {NORM[4:]}\n        x = x / n", ["F.relu(x)", NORM]),
    ],
)
def test_nested_operators_and_results_with_names_get_lines(lines: str, plain: list[str]) -> None:
    found = plain_layout(task(lines), SPELLINGS)
    assert found is not None
    read = [line.strip() for line in found.splitlines() if line.startswith("        x = ")]
    assert read == [f"x = {line}" for line in plain] and read_program(found) is not None


@pytest.mark.parametrize(
    "lines",
    [
        "        x = torch.cumsum(x, dim=1) + torch.sort(x)",
        "        a = F.relu(x)\n        b = torch.tanh(a)\n        return a",
        "        a = F.relu(x)\n        return torch.sum(a, dim=1, keepdim=True) * a",
        "        x = x - x",
    ],
)
def test_what_needs_a_result_that_no_line_can_use_is_not_read(lines: str) -> None:
    assert read_program(task(lines)) is None


def test_a_parameter_has_the_shape_in_which_it_is_used() -> None:
    """One that is viewed has a value for each channel, and one that is not used is an argument, too."""
    init = """        self.shift = nn.Parameter(torch.zeros(6))
        self.other = nn.Parameter(torch.zeros(3))
"""
    program = read_program(task("        x = x + self.shift.view(1, -1, 1, 1)", init))
    assert program is not None and program.tensors == ("x", "y", "p_shift", "p_other", "out")
    (line,) = program.parts
    assert isinstance(line, Line) and line.shape == (1, 6, 1, 1)
    twice = "        x = x * self.shift.view(1, -1, 1, 1) + self.shift"
    assert read_program(task(f"{twice}.view(1, -1, 1, 1)", init)) is not None
    assert read_program(task(f"{twice}.view(-1)", init)) is None
    assert read_program(task(twice, init)) is None
    row = read_program(
        task("        x = x + self.shift", "        self.shift = nn.Parameter(torch.zeros(16))\n")
    )
    assert row is not None and isinstance(row.parts[0], Line) and row.parts[0].shape == (16,)
    assert read_program(task("        x = x + self.shift", init)) is None
    unused = init.replace("nn.Parameter(torch.zeros(3))", "nn.Linear(3, 3)")
    assert read_program(task("        x = x + self.shift.view(1, -1, 1, 1)", unused)) is None


@pytest.mark.parametrize(
    ("written", "shape"),
    [
        ("torch.triu(torch.rand(4, 4))", (4, 4)),
        ("(torch.rand(4, 4) + torch.rand(4, 4).T) / 2", (4, 4)),
        ("torch.rand(4, 2 * 8) * torch.rand(())", (4, 16)),
        ("(torch.rand(4, 8) * torch.rand(())).softmax(dim=-1)", (4, 8)),
        ("torch.rand(4, 8) + torch.rand(3, 4, 8)", None),
    ],
)
def test_an_input_has_the_shape_of_the_tensor_that_it_is_made_of(written: str, shape: Any) -> None:
    program = read_program(PEOPLE.replace("return [A]", f"return [{written}]"))
    assert (program.shape if program else None) == shape


def test_an_operand_that_enlarges_the_result_is_not_read() -> None:
    line = "        x = x + self.bias"
    assert read_program(task(line, "        self.bias = nn.Parameter(torch.randn(6, 1, 1))\n")) is not None
    assert read_program(task(line, "        self.bias = nn.Parameter(torch.randn(2, 1, 6, 1, 1))\n")) is None
    assert (
        read_program(task(line, "        self.bias = nn.Parameter(torch.randn(3, 8, 6, 16, 16))\n")) is None
    )


def test_damaged_sources_are_no_programs_and_raise_nothing() -> None:
    rng = random.Random(0)
    for source in (
        PEOPLE,
        task("        x = self.c(x)", "        self.c = nn.Conv2d(6, 8, kernel_size=3)\n"),
    ):
        for _ in range(300):
            first = rng.randrange(len(source))
            damaged = source[:first] + rng.choice(["", "*", "(", " 9 ** 9 ** 9 ", "None"])
            read_program(damaged + source[first + rng.randrange(12) :])
    assert read_program(PEOPLE.replace("2 * 2 ** (1 + 1)", "9 ** 9 ** 9")) is None
    assert read_program(PEOPLE.replace("2 * 2 ** (1 + 1)", "4 // 0")) is None
    assert read_program(PEOPLE.replace("torch.sigmoid(A)", "A * 9 ** 9 ** 9")) is None
    assert read_program(PEOPLE.replace("torch.sigmoid(A)", "A * (1 / 0)")) is None
