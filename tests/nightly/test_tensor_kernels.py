"""The kernels of tensor operators: each is built, and computes what torch computes on shapes of any size."""

import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from emulated_cuda import SHIM, emulated
from kernel_bench import build, call, compile_cuda

from components.bootstrap.nest_writer import (
    CpuNestSchedule,
    CudaNestSchedule,
    draw_nest_schedule,
    write_program,
)
from components.bootstrap.operator_chain import TASK_LAYOUT
from components.bootstrap.tensor_operators import LINES, OPERATORS, read_program
from components.core.records import Device
from components.synthesis.tensor_composer import Choice, fill, write_tensor_source

COMPOSED = [name for name, row in OPERATORS.items() if row.draw is not None]
# Lowest and highest sizes of the dimensions of inputs, by rank. Most are no multiples of a tile.
SIZES: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((3, 70),),
    2: ((2, 40), (2, 600)),
    3: ((1, 4), (3, 40), (5, 300)),
    4: ((1, 3), (3, 12), (5, 24), (5, 24)),
    5: ((1, 2), (3, 8), (5, 9), (5, 9), (5, 12)),
}
# Operators or forms that are not composed: outputs that are no floats, a state that never matters, and inputs
# or arguments that no draw has.
OTHERS = (
    *((f"torch.{name}(x, dim={dim}, keepdim={keep})", "", f"torch.randn({shape})")
      for name in ("argmax", "argmin")
      for dim, shape in ((1, "7, 33"), (0, "40, 5"), (1, "3, 9, 20"), (1, "7, 1"))
      for keep in (True, False)),
    ("self.norm(x)", "self.norm = nn.BatchNorm2d(6)", "torch.randn(3, 6, 7, 9)"),
    ("torch.matmul(x, y)", "", "torch.randn(30, 50), torch.randn(50, 1)"),
    ("x * self.w", "self.w = nn.Parameter(torch.tensor(1.5))", "torch.randn(7, 33)"),
    ("x + self.w.view(1, -1, 1)", "self.w = nn.Parameter(torch.randn(9))", "torch.randn(3, 9, 20)"),
    ("x @ self.w", "self.w = nn.Parameter(torch.randn(50, 11))", "torch.randn(4, 30, 50)"),
    ("x @ self.w.T", "self.w = nn.Parameter(torch.randn(11, 50))", "torch.randn(30, 50)"),
    ("F.max_pool1d(F.relu(x).unsqueeze(1), 3).squeeze(1) * 2.0", "", "torch.randn(7, 40)"),
    ("self.pool(x).flatten(1)", "self.pool = nn.AdaptiveAvgPool3d((1, 1, 1))", "torch.randn(2, 3, 5, 6, 7)"),
    ("x / x.norm(dim=-1, keepdim=True)", "", "torch.randn(3, 9, 20)"),
    ("F.relu(x) + x", "", "torch.randn(7, 33)"),
    ("self.a(torch.tanh(self.a(x)))", "self.a = nn.Linear(20, 20)", "torch.randn(7, 20)"),
    ("x + self.norm(x * 2.0) * x", "self.norm = nn.LayerNorm(33)", "torch.randn(7, 33)"),
    (
        "F.silu(self.a(x)) * self.b(x)",
        "self.a = nn.Linear(20, 11)\n        self.b = nn.Linear(20, 11)",
        "torch.randn(7, 20)",
    ),
    (
        "self.c(x) - x / torch.sigmoid(torch.tanh(x))",
        "self.c = nn.Conv2d(3, 3, 3, padding=1)",
        "torch.randn(2, 3, 6, 8)",
    ),
    ("torch.softmax(x, dim=1) / torch.cumsum(torch.abs(x) + 1.0, dim=1)", "", "torch.randn(7, 33)"),
    ('F.kl_div(torch.log(x), y, reduction="batchmean")', "", "torch.rand(30, 50), torch.rand(30, 50)"),
    ("torch.cumsum(x * y, dim=1)", "", "torch.randn(9, 70), torch.randint(0, 2, (9, 70)).bool()"),
    ("torch.mean(torch.clamp(1.0 - x * y, min=0.0))", "", "torch.randn(30, 50), torch.randn(50)"),
    ("x + y", "", "torch.randn(3, 9, 20), torch.randn(3, 1, 20)"),
    ("x * y", "", "torch.randn(9, 70), torch.randn(9, 70).bool()"),
    ("x - y", "", "torch.randn(9, 70), torch.randint(0, 5, (9, 1))"),
    ("F.mse_loss(x, y)", "", "torch.randn(3, 9, 20), torch.randn(3, 1, 20)"),
    ('F.kl_div(x, y, reduction="batchmean", log_target=True)', "", "torch.randn(33, 33), torch.randn(33)"),
    ("F.cosine_similarity(x, y, dim=2)", "", "torch.randn(3, 9, 20), torch.randn(9, 1)"),
    ("(x * self.w).flatten(1)", "self.w = nn.Parameter(torch.randn(20))", "torch.randn(3, 9, 20)"),
    ("x @ self.w.T", "self.w = nn.Parameter(torch.randn(11, 50))", "torch.randn(4, 30, 50)"),
    ("F.cross_entropy(x, y)", "", "torch.randn(7, 1), torch.randint(0, 1, (7,))"),
    ("x.T @ y", "", "torch.randn(50, 30), torch.randn(50, 11)"),
    (
        "self.conv(x)",
        "self.conv = nn.ConvTranspose2d(8, 12, (3, 5), stride=(2, 3), padding=(1, 2), dilation=(2, 1), "
        "output_padding=0, groups=4, bias=True)",
        "torch.randn(2, 8, 9, 11)",
    ),
)  # fmt: skip


def draw_shape(rng: random.Random, ranks: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """Draw a shape with one of the ranks, of which no dimension but the last is above `largest`."""
    *bounds, last = SIZES[rng.choice(ranks)]
    return (*(rng.randint(low, min(high, largest)) for low, high in bounds), rng.randint(*last))


def draw_source(rng: random.Random, names: list[str], largest: int = 40) -> str:
    """Draw shapes until the chain of operators fits one, and return its source."""
    while True:
        shape = draw_shape(rng, (1, 2, 2, 3, 4, 4, 5), largest)
        if len(shape) == 2 and rng.random() < 0.3:
            shape = (shape[0], shape[0])
        if filled := fill([Choice(name, rng.getrandbits(32)) for name in names], shape):
            return write_tensor_source(*filled)


def draw_sources(rng: random.Random, each: int, chains: int, largest: int = 40) -> list[str]:
    """Return sources of every operator alone, of chains, and of what is not composed."""
    sources = [draw_source(rng, [name], largest) for name in COMPOSED for _ in range(each)]
    for _ in range(chains):
        first = rng.choice([name for name in COMPOSED if name not in (*LINES, "diagonal")])
        found = None
        while found is None:
            rest = rng.sample(list(LINES) if rng.random() < 0.5 else COMPOSED, rng.randint(1, 4))
            shape = draw_shape(rng, OPERATORS[first].ranks, largest)
            found = fill([Choice(name, rng.getrandbits(32)) for name in (first, *rest)], shape)
            first = rng.choice([name for name in COMPOSED if name not in (*LINES, "diagonal")])
        sources.append(write_tensor_source(*found))
    for line, init, inputs in OTHERS:
        arguments = "x, y" if "), torch" in inputs else "x"
        text = f"        {init}\n" if init else ""
        layout = TASK_LAYOUT.format(
            init=text, arguments=arguments, lines=f"        x = {line}", inputs=inputs
        )
        sources.append(
            f"{layout}# in the words of people\n"
        )  # a source in the layout itself is not respelled
    return sources


def kernel_of(code: str, rng: random.Random, device: Device) -> str:
    program = read_program(code)
    assert program is not None, code
    return write_program(program, draw_nest_schedule(rng, device))


@torch.no_grad()
def reference(code: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return a task's kernel arguments without the output, and its float32 and float64 outputs."""
    space: dict = {}
    exec(code, space)
    torch.manual_seed(1)
    model, inputs = space["Model"]().eval(), space["get_inputs"]()
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) + 0.5 if "running" in name else torch.randn_like(value))
    state = [value.clone() for value in model.state_dict().values()]
    expected = model(*inputs).contiguous()
    wide = [value.double() if value.is_floating_point() else value for value in inputs]
    return [*inputs, *state], expected, model.double()(*wide)


def errors(sources: list[str], kernels: list[str], folder: Path, head: str = "") -> list[float]:
    """Return the largest error of each kernel, relative to the output's scale and to what is allowed.

    Sums in float, one term after the other, are less exact than torch's.
    """
    library = build(kernels, folder, head)
    found = []
    for index, code in enumerate(sources):
        arguments, expected, exact = reference(code)
        out = torch.full_like(expected, float("nan") if expected.is_floating_point() else -1)
        call(library, index, [value.reshape(-1) for value in (*arguments, out)])
        finite = exact.abs() < 1e30  # a product along a dimension may overflow, also on the way
        out, expected, exact = out[finite].double(), expected[finite].double(), exact[finite].double()
        scale = exact.abs().max().item() or 1.0
        own = ((expected - exact).abs().max() / scale).item()
        error = ((out - exact).abs().max() / scale).item() / max(1e-5, 20 * own)
        found.append(error if error == error else float("inf"))
    return found


def test_every_operator_computes_what_torch_computes_on_any_shape(tmp_path: Path) -> None:
    rng = random.Random(7)
    sources = draw_sources(rng, each=4, chains=80)
    found = errors(sources, [kernel_of(code, rng, "cpu") for code in sources], tmp_path)
    wrong = [code for code, error in zip(sources, found, strict=True) if not error < 1]
    assert not wrong, f"{len(wrong)} of {len(sources)}, such as {wrong[0]}"


def test_cuda_kernels_compute_the_same_where_they_are_emulated(tmp_path: Path) -> None:
    rng = random.Random(9)
    sources = draw_sources(rng, each=1, chains=20, largest=8)
    kernels = [emulated(kernel_of(code, rng, "cuda")) for code in sources]
    found = errors(sources, kernels, tmp_path, SHIM)
    wrong = [code for code, error in zip(sources, found, strict=True) if not error < 1]
    assert not wrong, f"{len(wrong)} of {len(sources)}, such as {wrong[0]}"


@pytest.mark.parametrize(
    ("line", "inputs", "parameter"),
    [
        ("x @ y + y", "torch.randn(8, 8), torch.randn(8, 8)", ""),
        ("torch.relu(x @ y) * y", "torch.randn(8, 8), torch.randn(8, 8)", ""),
        ("torch.bmm(x, y) + y", "torch.randn(4, 8, 8), torch.randn(4, 8, 8)", ""),
        ("torch.triu(x @ y) + y", "torch.randn(8, 8), torch.randn(8, 8)", ""),
        ("torch.sum(x * y, dim=1) + y", "torch.randn(7, 7), torch.randn(7)", ""),
        ("torch.mean(x + self.w, dim=1) * self.w", "torch.randn(7, 7)", "w = torch.randn(7)"),
        ("x @ self.w + self.w", "torch.randn(8, 8)", "w = torch.randn(8, 8)"),
        ("x @ self.a", "torch.randn(30, 50)", "a = torch.randn(50, 11)"),
        ("torch.tanh(x * self.o)", "torch.randn(30, 50)", "o = torch.randn(50)"),
        ("x * self.x", "torch.randn(30, 50)", "x = torch.randn(50)"),
        ("x * self.int", "torch.randn(30, 50)", "int = torch.randn(50)"),
        ("torch.triu(x @ y)", "torch.randn(5, 3), torch.randn(3, 20)", ""),
        ("torch.triu(x) @ torch.triu(y)", "torch.randn(5, 3), torch.randn(3, 20)", ""),
    ],
)
def test_operands_are_read_where_they_are_whatever_they_are_called(
    line: str, inputs: str, parameter: str, tmp_path: Path
) -> None:
    name, _, made = parameter.partition(" = ")
    init = f"        self.{name} = nn.Parameter({made})\n" if name else ""
    arguments = ", ".join("xy"[: inputs.count("randn")])
    layout = TASK_LAYOUT.format(init=init, arguments=arguments, lines=f"        x = {line}", inputs=inputs)
    code = f"{layout}# in the words of people\n"
    program = read_program(code)
    assert program is not None
    kernels = [
        write_program(program, CpuNestSchedule(fusion, "vec", "scalar", "double", layout, 1, 16))
        for fusion in ("all", "none")
        for layout in ("given", "copy")
    ]
    assert max(errors([code] * len(kernels), kernels, tmp_path)) < 1


# Expressions of one and of two results, of which random programs are made.
ONE = """
torch.tanh({a})|{a} * 0.5|1.5 + {a}|self.norm({a})|torch.softmax({a}, dim=1)|self.linear({a})|self.gain * {a}
{a}.sigmoid()|torch.cumsum({a}, dim=1) * 0.1|{a}.clone()|torch.mean({a}, dim=1, keepdim=True) * y
{a} / {a}.norm(dim=1, keepdim=True)|{a} - {a}.mean(dim=1, keepdim=True)
"""
TWO = """
{a} + {b}|{a} * {b}|{a} - {b}|{a} / (torch.abs({b}) + 1.0)|F.relu({a}) * {b}
torch.tanh({a}) + F.gelu({b})|{a} + y
"""
MODULES = ("norm = nn.LayerNorm(12)", "linear = nn.Linear(12, 12)", "gain = nn.Parameter(torch.randn(12))")
PROGRAM = """import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__(){init}

    def forward(self, x, y):
        {lines}


def get_inputs():
    return [torch.randn(6, 12), torch.randn(6, 12)]


def get_init_inputs():
    return []
"""


def draw_program(rng: random.Random) -> str:
    """Draw a program whose statements use results of earlier ones, also several times, and rebind names."""
    names, lines = ["x"], []
    for index in range(rng.randint(3, 7)):
        text = rng.choice(re.split(r"[|\n]", (ONE if rng.random() < 0.6 else TWO).strip()))
        text = text.format(a=rng.choice(names[-3:]), b=rng.choice(names[-3:]))
        name = rng.choice([*names, f"t{index}", f"t{index}"])
        lines.append(f"{name} = {text}")
        names = [*(one for one in names if one != name), name]
    body = "\n        ".join([*lines, f"return {names[-1]}"])
    used = [f"\n        self.{one}" for one in MODULES if f"self.{one.partition(' ')[0]}" in body]
    return PROGRAM.format(init="".join(used), lines=body)


def test_programs_that_use_results_again_compute_what_torch_computes(tmp_path: Path) -> None:
    rng = random.Random(3)
    programs = [draw_program(rng) for _ in range(500)]
    sources = [code for code in programs if read_program(code) is not None]
    assert len(sources) > 60
    found = errors(sources, [kernel_of(code, rng, "cpu") for code in sources], tmp_path)
    wrong = [code for code, error in zip(sources, found, strict=True) if not error < 1]
    assert not wrong, f"{len(wrong)} of {len(sources)}, such as {wrong[0]}"


def test_what_precedes_a_convolution_by_a_library_is_computed(tmp_path: Path) -> None:
    code = TASK_LAYOUT.format(
        init="        self.conv = nn.Conv2d(4, 4, 3, stride=1, padding=0, dilation=1, groups=4, "
        "bias=False)\n",
        arguments="x",
        lines="        x = F.relu(x)\n        x = self.conv(x)",
        inputs="torch.randn(2, 4, 8, 8)",
    )
    program = read_program(code)
    assert program is not None
    kernel = write_program(program, CudaNestSchedule("all", 128, "float", "given", 1, "library"))
    assert "Convolution " in kernel
    assert max(errors([code], [emulated(kernel)], tmp_path, SHIM)) < 1


def test_a_wrong_kernel_of_an_operator_is_seen(tmp_path: Path) -> None:
    rng = random.Random(2)
    changes = (("softmax", "v - top", "v * 0.5f - top"), ("sum", "total += v", "total += 1.001f * v"))
    changes += (("conv_2", "total += v", "total = v"), ("cumsum", "total += v", "total = v"))
    sources = [draw_source(rng, [name]) for name, _, _ in changes]
    right = [kernel_of(code, rng, "cpu") for code in sources]
    kernels = [changed_kernel(text, old, new) for text, (_, old, new) in zip(right, changes, strict=True)]
    assert all(error > 1 for error in errors(sources, kernels, tmp_path))


def changed_kernel(text: str, old: str, new: str) -> str:
    """The kernel with one expression changed, whatever the indices of its tiles are."""
    pattern = re.escape(old).replace("total", r"(total[\w\[\]]*)").replace("top", r"(top[\w\[\]]*)")
    changed = re.sub(pattern, lambda m: re.sub("total|top", lambda _: m[1], new, count=1), text)
    assert changed != text
    return changed


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_cuda_kernels_of_every_operator_compile(tmp_path: Path) -> None:
    rng = random.Random(5)
    sources = draw_sources(rng, each=1, chains=40)
    compile_cuda([kernel_of(code, rng, "cuda") for code in sources], tmp_path)
