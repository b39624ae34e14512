"""A person's module is recognised as a chain however it is written, and a look-alike is not."""

import itertools
from typing import Any

import pytest
import torch
from agent_fixtures import params

from components.bootstrap.canonicalize import canonicalize
from components.bootstrap.operator_chain import read_chain
from components.synthesis.core_composer import compose_tasks


def is_core_chain(code: str) -> bool:
    """Return whether a module is recognised as a chain of core operators."""
    return read_chain(canonicalize(code) or "") is not None


def test_a_composed_task_comes_back_as_it_is() -> None:
    for task in itertools.islice(compose_tasks(5, params().data), 40):
        assert canonicalize(task.code) == task.code


INPUTS = "def get_inputs():\n    return [torch.randn(256, 512)]\n"


def test_a_chain_is_recognised_in_a_persons_own_words() -> None:
    mine = (
        'class Model(nn.Module):\n    """Words."""\n    def forward(self, x):\n        return'
        f" torch.sqrt(torch.abs(x * 2.0) + 1.0)  # a comment\n{INPUTS}"
    )
    form = canonicalize(mine)
    assert (
        form is not None
        and "        x = x * 2.0\n        x = torch.sqrt(torch.abs(x) + 1.0)\n        return x\n" in form
    )
    for other in (
        "x @ x",
        "x.cumprod(0)",
        "x.t()",
        "x.contiguous()",
        "F.max_pool1d(x, 2, 1)",
        "x.relu(inplace=True)",
        "F.relu(x) + F.relu(x)",
        "F.conv2d(x, x)",
        "F.gelu(x, approximate='tanh')",
        "x * y.sigmoid()",
    ):
        assert not is_core_chain(
            f"class Model(nn.Module):\n    def forward(self, x):\n        return {other}\n{INPUTS}"
        )


@pytest.mark.parametrize(
    ("line", "inputs"),
    [
        ("F.relu(x) + y", "torch.randn(256, 512), torch.randn(512)"),
        ("F.relu(x) + y", "torch.randn(1, 512), torch.randn(256, 512)"),
        ("F.relu(x) * self.w", "torch.randn(256, 1), torch.randn(256, 1)"),
        ("torch.sum(x, dim=1, keepdim=True) * self.w", "torch.randn(256, 512), torch.randn(256, 512)"),
        ("torch.softmax(x, dim=0)", "torch.randn(512), torch.randn(512)"),
        ("F.relu(x)", "torch.randint(0, 5, (256, 512)), torch.randn(256, 512)"),
    ],
    ids=["smaller", "larger", "larger_parameter", "after_a_reduction", "vector", "integers"],
)
def test_what_would_have_to_be_broadcast_is_no_chain(line: str, inputs: str) -> None:
    init = "def __init__(self):\n        super().__init__()\n        self.w = nn.Parameter(torch.ones(512))"
    if "self.w" not in line:
        init = init.rpartition("\n")[0]
    code = (
        f"class Model(nn.Module):\n    {init}\n\n    def forward(self, x, y):\n        return {line}\n\n"
        f"def get_inputs():\n    return [{inputs}]\n"
    )
    assert not is_core_chain(code)
    usual = "torch.randn(256, 512)"
    if "sum" not in line and "dim=0" not in line:
        assert is_core_chain(code.replace(inputs, f"{usual}, {usual}"))


def test_a_sum_in_parentheses_before_a_product_is_recognised() -> None:
    mine = f"class Model(nn.Module):\n    def forward(self, x):\n        return (x + 1) * 2\n{INPUTS}"
    form = canonicalize(mine)
    assert form is not None and "        x = x + 1.0\n        x = x * 2.0\n        return x\n" in form


OWN_WORDS = """import torch
from torch import nn

rows, width = 256, 512


class Model(nn.Module):
    def __init__(self, features, slope=0.25):
        super(Model, self).__init__()
        self.factor = 2
        self.norm = torch.nn.LayerNorm(features)
        self.gain = nn.Parameter(torch.ones(features))
        self.act = nn.LeakyReLU(negative_slope=slope)

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        h = self.gain * self.act(self.norm(hidden))
        h = gate * h
        h = self.factor * torch.nn.functional.tanh(h) ** 2
        return h.clamp(max=1, min=-1).mean(1, keepdim=True)


def get_inputs():
    x = torch.rand(rows, width)
    return [x, torch.rand(rows, width)]


def get_init_inputs():
    return [512]
"""
COMPOSED_WORDS = """        self.layer_norm = nn.LayerNorm(512)
        self.scale = nn.Parameter(torch.randn(512))

    def forward(self, x, y):
        x = self.layer_norm(x)
        x = F.leaky_relu(x, 0.25)
        x = x * self.scale
        x = x * y
        x = torch.tanh(x)
        x = torch.square(x)
        x = x * 2.0
        x = torch.clamp(x, -1.0, 1.0)
        x = torch.mean(x, dim=-1, keepdim=True)
        return x


def get_inputs():
    return [torch.randn(256, 512), torch.randn(256, 512)]
"""


def test_names_methods_and_modules_of_a_persons_own_make_no_difference() -> None:
    form = canonicalize(OWN_WORDS)
    assert form is not None and COMPOSED_WORDS in form
    spaces: list[dict[str, Any]] = [{}, {}]
    for space, code in zip(spaces, (OWN_WORDS, form), strict=True):
        exec(code, space)
    mine, composed = spaces[0]["Model"](512), spaces[1]["Model"]()
    composed.load_state_dict(
        {"layer_norm.weight": mine.norm.weight, "layer_norm.bias": mine.norm.bias, "scale": mine.gain}
    )
    inputs = spaces[0]["get_inputs"]()
    torch.testing.assert_close(composed(*inputs), mine(*inputs))


IMPORTS = """import torch as th
from math import sqrt
from torch.nn import functional as functions, Module, Parameter, Hardtanh
from torch.nn.functional import softplus as smooth


class Model(Module):
    def __init__(self, limit=2.0):
        super().__init__()
        self.gain = Parameter(th.rand(512))
        self.last = Hardtanh(-limit, limit)

    def forward(self, a):
        return self.last(self.gain * functions.gelu(smooth(a) * sqrt(4)))


def get_inputs():
    return [th.rand(256, 512)]
"""


def test_imported_names_make_no_difference_unless_they_mean_something_else() -> None:
    form = canonicalize(IMPORTS)
    assert form is not None
    lines = form.partition("forward(self, x):\n")[2].partition("        return")[0].split("        x = ")
    assert [line.strip() for line in lines[1:]] == [
        "F.softplus(x)",
        "x * 2.0",
        "F.gelu(x)",
        "x * self.scale",
        "torch.clamp(x, -2.0, 2.0)",
    ]
    for old, new in (
        ("from torch.nn.functional import softplus as smooth", "from mine import smooth"),
        ("from torch.nn.functional import softplus as smooth", "from .functional import softplus as smooth"),
        ("from torch.nn.functional import softplus as smooth", "from torch.nn.functional import *"),
        ("from math import sqrt", "from math import sqrt\nfrom torch import sqrt"),
        ("class Model", "def smooth(x):\n    return x\n\n\nclass Model"),
        ("forward(self, a)", "forward(self, smooth)"),
    ):
        assert old in IMPORTS and canonicalize(IMPORTS.replace(old, new)) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("h = gate * h", "h = hidden * gate"),
        ("h = gate * h", "h = h * h"),
        ("h = gate * h", "h *= gate"),
        ("self.act(self.norm(hidden))", "self.act(hidden)"),
        ("self.factor = 2", "self.factor = nn.Linear(512, 512)"),
        (".mean(1, keepdim=True)", ".mean(keepdim=True)"),
    ],
    ids=["branch", "used_twice", "in_place", "unused_parameters", "other_module", "no_dimension"],
)
def test_what_only_looks_like_a_chain_is_none(old: str, new: str) -> None:
    assert old in OWN_WORDS and not is_core_chain(OWN_WORDS.replace(old, new))


TENSOR_WORDS = '''import torch
import torch.nn as nn


class Model(nn.Module):
    """Convolve, divide by a learned number, and take the smallest of each channel."""

    def __init__(self, channels, kernel_size, shape):
        super(Model, self).__init__()
        self.conv = nn.Conv2d(3, channels, kernel_size, stride=(1, 1), padding=(0, 1))
        self.act = nn.LeakyReLU(0.2)
        self.divisor = nn.Parameter(torch.ones(shape))
        self.other = nn.Parameter(torch.ones(1))

    def forward(self, image):
        y = self.act(self.conv(image)) + self.divisor
        y = y - self.other
        return torch.min(y, dim=1, keepdim=True)[0]


height = width = 2 * 8


def get_inputs():
    return [torch.rand(4, 3, height, width)]


def get_init_inputs():
    return [8, 3, (8, 1, 1)]
'''
TENSOR_FORM = """
        self.m0 = nn.Conv2d(3, 8, 3, stride=1, padding=(0, 1), dilation=1, groups=1, bias=True)
        self.m1 = nn.Parameter(torch.randn((8, 1, 1)))
        self.m2 = nn.Parameter(torch.randn(1))

    def forward(self, x):
        x = self.m0(x)
        x = F.leaky_relu(x, 0.2)
        x = x + self.m1
        x = x - self.m2
        x = torch.min(x, dim=1, keepdim=True)[0]
        return x


def get_inputs():
    return [torch.randn(4, 3, 16, 16)]
"""


def test_a_chain_of_tensor_operators_is_written_with_numbers_and_one_operator_a_line() -> None:
    form = canonicalize(TENSOR_WORDS)
    assert form is not None and TENSOR_FORM in form and canonicalize(form) == form
    line = TENSOR_WORDS.replace("Conv2d", "Conv1d").replace("(0, 1)", "(1,)").replace("(1, 1)", "(1,)")
    line = line.replace("3, height, width", "3, width").replace("(8, 1, 1)", "(8, 1)")
    assert "nn.Conv1d(3, 8, 3, stride=1, padding=1, dilation=1" in str(canonicalize(line))
    assert canonicalize(TENSOR_WORDS.replace("torch.min(y,", "torch.min(y * y,")) is None
