"""Modules that look like chains of tensor operators, but for which the rules' kernels would be wrong."""

import ast
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from components.bootstrap.canonicalize import canonicalize
from components.bootstrap.operator_chain import read_chain
from components.bootstrap.spelling import BY_POSITION, POSITIONAL, Speller
from components.bootstrap.tensor_operators import SPELLINGS, read_program

SOURCE = """import torch
import torch.nn as nn
import torch.nn.functional as F
{before}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {arguments}):
        return {line}

def get_inputs():
    return [{inputs}]
"""


def is_read(line: str, *inputs: str, init: str = "self.s = 1.0", before: str = "") -> bool:
    """Whether a task is read; an input is a call of torch, or the sizes of an input of floats."""
    calls = [text if text.startswith("torch.") else f"torch.randn({text})" for text in inputs]
    arguments, drawn = ", ".join("xyz"[: len(inputs)]), ", ".join(calls)
    code = SOURCE.format(line=line, inputs=drawn, init=init, before=before, arguments=arguments)
    return read_program(code) is not None


@pytest.mark.parametrize(
    ("line", "right", "wrong"),
    [
        ("torch.matmul(x, y)", ("3, 8, 16", "3, 16, 5"), ("3, 8, 16", "1, 16, 5")),
        ("torch.matmul(x, y)", ("3, 8, 16", "16, 5"), ("8, 16", "3, 16, 5")),
        ("torch.matmul(x, y)", ("2, 3, 8, 16", "2, 3, 16, 5"), ("2, 3, 8, 16", "3, 16, 5")),
        ("torch.matmul(x, y)", ("8, 16", "16, 1"), ("8, 16", "16")),
        ("torch.matmul(x, y)", ("3, 16, 16", "16, 16"), ("3, 16, 16", "16")),
        ("torch.bmm(x, y)", ("1, 8, 16", "1, 16, 5"), ("1, 8, 16", "3, 16, 5")),
        ("torch.einsum('ij,jk->ik', x, y)", ("5, 7", "7, 5"), ("5, 1", "7, 5")),
        ("x.T @ y", ("4, 4", "4, 4"), ("4, 4, 4", "4, 4")),
        ("x @ y.T", ("4, 4, 4", "4, 4"), ("4, 4, 4", "4, 4, 4")),
        (
            "F.scaled_dot_product_attention(x, y, z)",
            ("2, 4, 6, 8", "2, 4, 9, 8", "2, 4, 9, 5"),
            ("2, 4, 6, 8", "1, 4, 9, 8", "1, 4, 9, 5"),
        ),
        ("x.unsqueeze(1) * y", ("64", "64, 512"), ("64", "1, 512")),
        ("x.unsqueeze(1) * y", ("1", "1, 512"), ("1", "64, 512")),
        ("F.mse_loss(x, y)", ("7, 33", "33"), ("1, 33", "7, 33")),
        ("torch.mean((x - y) ** 2)", ("7, 33", "7, 1"), ("7, 1", "7, 33")),
        ("torch.mean(torch.clamp(1 - x * y, min=0))", ("7, 33", "7, 1"), ("7, 1", "7, 33")),
        ("F.cosine_similarity(x, y, dim=1)", ("7, 33", "1, 33"), ("1, 33", "7, 33")),
        ("torch.cumsum(x * y, dim=1)", ("7, 33", "33"), ("7, 1", "7, 33")),
        ("x + y", ("3, 9, 20", "3, 1, 20"), ("3, 1, 20", "3, 9, 20")),
        ("F.l1_loss(x, y)", ("1, 33", "1, 33"), ("33", "33")),
        ("F.triplet_margin_loss(x, y, z)", ("7, 33", "7, 33", "7, 33"), ("33", "33", "33")),
        ("F.cross_entropy(x, y)", ("7, 33", "torch.randint(0, 33, (7,))"), ("7, 33", "7, 33")),
        ("F.cross_entropy(x, y)", ("7, 7", "torch.randint(0, 7, (7,))"), ("7, 7", "7")),
        ("x * 2.0", ("7, 33",), ("torch.randint(0, 5, (7, 33))",)),
        ("torch.sum(x, dim=1)", ("7, 33",), ("torch.randn(7, 33).bool()",)),
        ("x * y", ("7, 33", "torch.randint(0, 5, (33,))"), ("7, 33", "torch.randint(0, 5, (33,)) / 2")),
        ("F.mse_loss(x, y)", ("7, 33", "torch.rand(33) * 2"), ("7, 33", "torch.randint(0, 5, (33,))")),
        (
            "x * y",
            ("5, 5", "torch.rand(5, 5) + torch.rand(5, 5).T"),
            ("5, 5", "torch.rand(1, 5) + torch.rand(1, 5).T"),
        ),
    ],
)
def test_operands_have_shapes_and_types_that_the_kernel_supports(
    line: str, right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    assert is_read(line, *right) and not is_read(line, *wrong)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("torch.var(x, 1)", "torch.var(x, 1, False)"),
        ("torch.var(x, dim=1)", "torch.var(x, False)"),
        ("torch.std(x, 1, keepdim=True)", "torch.std(x, 1, True)"),
        ("x.var(1)", "x.var(1, False)"),
        ("F.normalize(x, dim=1)", "F.normalize(x, 1)"),
        ("F.normalize(x, p=2, dim=1)", "F.normalize(x, 2)"),
        ("torch.sum(x, dim=1)", "torch.sum(x, dim=())"),
        ("torch.softmax(x, 1)", "torch.softmax(x, 1, torch.float64)"),
        ("torch.mul(x, 2.0)", "torch.mul(x, 2.0, out=x)"),
        (
            "torch.max(x, torch.tensor(0.5, device=x.device))",
            "torch.max(x, torch.tensor(0.5, dtype=torch.int64))",
        ),
        ("torch.argmax(x, dim=1)", "torch.argmax(x, dim=1) * 0.5"),
        ("torch.argmax(x, dim=1, keepdim=True)", "torch.argmax(x, dim=1, keepdim=True).squeeze(1)"),
    ],
)
def test_arguments_that_mean_something_else_and_results_of_integers_are_not_read(
    right: str, wrong: str
) -> None:
    assert is_read(right, "7, 33") and not is_read(wrong, "7, 33")


@pytest.mark.parametrize(
    ("line", "right", "wrong"),
    [
        ("x * y", "torch.rand(4)", "torch.rand(4, 1).permute((1, 0)).float()"),
        (
            "x * y",
            "torch.randint(0, 9, torch.rand(4).shape)",
            "torch.randint(0, 9, torch.rand(4, 5).mean(1).shape)",
        ),
    ],
)
def test_the_shape_of_an_input_is_that_which_its_calls_make(line: str, right: str, wrong: str) -> None:
    assert is_read(line, "3, 4", right) and not is_read(line, "3, 4", wrong)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("torch.full((33,), 2.0)", "torch.full((33,), 2)"), ("torch.tensor(1.5)", "torch.tensor(2)")],
)
def test_parameters_of_integers_are_not_read(right: str, wrong: str) -> None:
    for made, expected in ((right, True), (wrong, False)):
        init = f"self.s = nn.Parameter({made}, requires_grad=False)"
        assert is_read("x * self.s", "7, 33", init=init) is expected


def test_arguments_of_forward_without_an_input_have_their_default() -> None:
    code = SOURCE.format(
        line="torch.relu(x) * y",
        inputs="torch.randn(8, 256)",
        init="self.s = 1",
        before="",
        arguments="x, y=2.0",
    )
    program, form = read_program(code), canonicalize(code)
    assert program is not None and program.tensors == ("x", "out")
    assert form is not None and "        x = x * 2.0\n" in form and "forward(self, x)" in form
    assert canonicalize(code.replace("y=2.0", "y=None")) is None
    composed = form.replace("forward(self, x)", "forward(self, x, y)")
    assert read_chain(composed) is None, "an argument without an input"


def test_a_letter_that_occurs_twice_in_a_factor_makes_no_product_of_matrices() -> None:
    assert is_read("torch.einsum('ij,jk->ik', x, y)", "5, 5", "5, 5")
    assert not is_read("torch.einsum('jj,jk->jk', x, y)", "5, 5", "5, 5")


def orders(name: str) -> list[list[str]]:
    """The orders in which a function of torch takes its arguments by position, without those of the line."""
    skipped = max(1, len(SPELLINGS.functions[name].args) - len(POSITIONAL.get(name, ())))
    try:
        found = [[*inspect.signature(getattr(F, name)).parameters]]
    except (AttributeError, ValueError):
        found = [["args"]]
    if found[0][0] in ("args", "input") and len(found[0]) < 3:
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
        found = [[one.name for one in schema.arguments if not one.kwarg_only] for schema in schemas] or found
    return [order[skipped:] for order in found]


def by_position(name: str) -> list[str]:
    line = SPELLINGS.functions[name]
    named = [*POSITIONAL.get(name, ())[: len(line.args) - 1], *(one.arg for one in line.keywords)]
    return named[: BY_POSITION.get(name, len(named))]


@pytest.mark.parametrize(
    "name", [name for name in SPELLINGS.functions if name not in ("self", "keep", "vector_norm")]
)
def test_arguments_by_position_are_those_that_torch_has_there(name: str) -> None:
    taken = by_position(name)
    assert not taken or any(order[: len(taken)] == taken for order in orders(name))


def test_modules_have_the_arguments_of_their_functions_at_the_same_positions() -> None:
    speller, checked = Speller(SPELLINGS, {}), 0
    for kind, made in vars(nn).items():
        name = speller.function_of(ast.parse(f"nn.{kind}()", mode="eval").body)
        if name not in ("", "identity") and inspect.isclass(made):
            taken = by_position(name)
            assert [*inspect.signature(made).parameters][: len(taken)] == taken, kind
            checked += 1
    assert checked > 30


@pytest.mark.parametrize(
    "before",
    [
        "S = 2.0\nS += 1.0",
        "S = 2.0\nif True:\n    S = 3.0",
        "S = 2.0\nS: float = 3.0",
        "S = 2.0\nfor S in (3.0, 4.0):\n    pass",
        "S = 2.0\nS, T = (3.0, 4.0, 5.0)[:2]",
        "S = 2.0\nS, T = *(3.0,), 4.0",
        "S = 2.0\nT = (S := 4.0)",
        "S = 2.0\nS = max(3.0, 4.0)",
        "S = 2.0\nfrom math import pi as S",
        "S = 2.0\nfrom math import *",
        "S = 2.0\ndef S():\n    pass",
        "S = 2.0\ndel S",
        "S = 2.0\nclass F:\n    pass\nclass nn:\n    Module = object",
        "S = 2.0\nimport numpy as nn",
        "S = 2.0\nclass Model(nn.Module):\n    def forward(self, x):\n        return x * 5.0",
        "S = 2.0\ndef get_inputs():\n    return []",
        "S = 2.0\ntorch.set_default_dtype(torch.float64)",
        "S = 2.0\nF.relu = torch.abs",
        "S = 2.0\n_ = torch.set_default_dtype(torch.float64)",
        "S = 2.0\nclass H:\n    F.relu = torch.tanh",
        "S = 2.0\ndef h(x=torch.set_default_dtype(torch.float64)):\n    pass",
    ],
)
def test_a_source_in_which_a_known_name_may_mean_something_else_is_not_read(before: str) -> None:
    assert not is_read("x * S", "7, 33", before=before)


def test_usual_imports_new_values_of_names_and_a_main_program_are_read() -> None:
    more = "from torch import Tensor, nn\nimport torch.nn\nimport math\nimport numpy as np\n"
    assert is_read("x * S", "7, 33", before=f"{more}S = T = 2.0\nS, T = 3.0, 4.0")
    assert is_read("x * S", "7, 33", before='S = 2.0\nif __name__ == "__main__":\n    S = 3.0')


@pytest.mark.parametrize(
    ("line", "init", "before"),
    [
        ("F.relu(x)", "self.s = 1.0", "class F:\n    relu = torch.abs"),
        ("keep(x, 0)", "self.s = 1.0", "def keep(x, index):\n    return x * 2.0"),
        ("self.a(x)", "self.a = Mish()", "class Mish(nn.Module):\n    forward = torch.abs"),
        ("self.a(x)", "self.a = Linear(33, 5)", "from other import Linear"),
        ("self.a(x)", "self.a = self.b = nn.Linear(33, 5)", ""),
        ("self.a(x)", "self.a = nn.Linear(33, 5)\n        super().__init__()\n        self.half()", ""),
        ("x * S", "self.s = 1.0\n\n    def __call__(self, x):\n        return x", "S = 2.0"),
    ],
)
def test_names_and_methods_of_a_source_are_not_taken_for_those_of_torch(
    line: str, init: str, before: str
) -> None:
    assert not is_read(line, "7, 33", init=init, before=before)


def test_bare_classes_of_torch_are_read() -> None:
    assert is_read("self.a(x)", "7, 33", init="self.a = Linear(33, 5)", before="from torch.nn import Linear")


@pytest.mark.parametrize("line", ["-" * 9000 + "x", "(" * 500 + "x" + ")" * 500, " + ".join(["x"] * 9000)])
def test_a_deep_expression_is_not_read(line: str) -> None:
    assert not is_read(line, "7, 33")
