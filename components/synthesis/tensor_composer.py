"""Composition of tasks of the kinds of KernelBench's levels 1 and 2 from the tensor operators.

A task is a PyTorch module that a policy has to make faster: a single operator of
components/bootstrap/tensor_operators.py or a short chain of them, on inputs of any rank, whose sizes are
often no powers of two, in a source as people write it (source_style.py). The rule-based kernel writer can
write kernels for all of these tasks. A chain becomes a task only if its output on a small input varies, and
changes when any operator is left out.
"""

import itertools
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from components.bootstrap.loop_nest import Nest, Shape
from components.bootstrap.operator_chain import TASK_LAYOUT
from components.bootstrap.tensor_operator import Arguments
from components.bootstrap.tensor_operators import LINES, OPERATORS, read_program
from components.bootstrap.tensor_products import PRODUCTS
from components.bootstrap.tensor_reductions import RESHAPES
from components.core.errors import refuse
from components.core.params import Data
from components.core.records import Device
from components.core.task import KernelTask
from components.synthesis.operator_ablation import composed_task, draw_weighted, passes_ablation
from components.synthesis.source_style import restyle

# Sizes that the dimensions of inputs may have, by rank. The last two dimensions of images and volumes are
# equal in half of all tasks.
ROWS = (1, 16, 64, 100, 128, 256, 512, 1000, 1024, 2048, 4096, 8192, 16384, 32768)
WIDTHS = (64, 100, 128, 255, 256, 512, 768, 1000, 1024, 2048, 2949, 4096, 8192, 16384, 65536)
BATCHES, CHANNELS = (1, 2, 4, 8, 16, 32, 64, 128), (3, 8, 16, 32, 48, 64, 96, 128, 256)
SIDES = (7, 14, 16, 28, 32, 56, 64, 100, 112, 128, 224, 255, 256, 512)
DIMENSIONS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: (WIDTHS,),
    2: (ROWS, WIDTHS),
    3: (BATCHES, CHANNELS, WIDTHS),
    4: (BATCHES, CHANNELS, SIDES, SIDES),
    5: (BATCHES[:5], CHANNELS[:6], SIDES[:8], SIDES[:8], SIDES[:8]),
}
# Probabilities of the ranks of a chain's input.
RANKS = {1: 0.02, 2: 0.33, 3: 0.2, 4: 0.3, 5: 0.15}
# Operator that keeps a result, operators that use it later, and its names in their lines and in sources.
KEEP, USES, KEPT_NAME, WRITTEN_NAME = "keep", ("add_kept", "mul_kept"), "kept_0", "identity"
# Probability that a chain of at least four operators keeps a result and uses it later.
RESIDUAL_SHARE = 0.15
# Largest sizes of the small input on which chains are tried.
SMALL = (4, 16, 9, 9, 9)
# Probabilities of the kinds of a chain's first operator, about those in KernelBench's levels 1 and 2.
KINDS = {"convolution": 0.4, "product": 0.2, "other": 0.4}
# Number of shapes that are tried for one kind.
MAX_ATTEMPTS = 100
# Probability that an operator after the first is elementwise.
ELEMENTWISE_SHARE = 0.6
# Approximate seconds of a multiplication and an addition of a product, and of an element of other operators.
SECONDS: dict[Device, tuple[float, float]] = {"cpu": (5e-11, 5e-10), "cuda": (5e-14, 3e-12)}
# Number of draws after which a chain is accepted although its estimated eager time lies outside of
# data.eager_seconds.
MAX_DRAWS = 300


@dataclass(frozen=True)
class Choice:
    """An operator of a chain, and the seed by which its arguments are drawn for any input shape.

    `name` is its key in OPERATORS.
    """

    name: str
    seed: int


@dataclass(frozen=True)
class Step:
    """An operator of a chain with its arguments for one shape.

    `attribute` is the expression for its module or parameter, such as self.NAME_1 for the first step.
    """

    name: str
    arguments: Arguments
    attribute: str


def fill(choices: Sequence[Choice], shape: Shape) -> tuple[list[Step], dict[str, Shape]] | None:
    """Return the steps of a chain on an input of this shape, and the shapes of all inputs by name.

    `choices` has the operators of the chain with the seeds of their arguments, and a step has the arguments
    that were drawn. The result is None if an operator does not fit the output of the one before, if two
    operators need a further input of the same name, or if a result that is used later has another shape then.
    """
    inputs: dict[str, Shape] = {"x": shape}
    kept: dict[str, Shape] = {}
    steps = []
    for index, choice in enumerate(choices, 1):
        operator = OPERATORS[choice.name]
        fits = len(shape) in operator.ranks and (choice.name not in USES or kept.get(KEPT_NAME) == shape)
        draw = operator.draw or (lambda *_: {"index": 0})
        drawn = draw(random.Random(choice.seed), shape) if fits else None
        more = {} if drawn is None else drawn.pop("inputs", {})
        if drawn is None or more.keys() & inputs.keys():
            return None
        steps.append(Step(choice.name, drawn, f"self.{choice.name}_{index}"))
        inputs |= more
        arguments = {key: value for key, value in drawn.items() if key != "classes"}
        further = kept | {key: value for key, value in inputs.items() if key != "x"}
        for part in operator.build(shape, further, choice.name, **arguments):
            shape = part.shape if isinstance(part, Nest) else shape
        kept |= {KEPT_NAME: shape} if choice.name == KEEP else {}
    return steps, inputs


def write_tensor_source(steps: Sequence[Step], inputs: dict[str, Shape]) -> str:
    """Return the Python source of a task that applies the steps in order to inputs of these shapes.

    A step is an operator with its arguments. `inputs` has the shapes by the inputs' names, `x` first.
    """
    init, lines, classes = "", [], 0
    for step in steps:
        operator, arguments = OPERATORS[step.name], step.arguments
        if operator.init:
            init += f"        {step.attribute} = {operator.init.format(**arguments)}\n"
        line = f"x = {operator.line.format(self=step.attribute, **arguments)}"
        line = f"{WRITTEN_NAME} = x" if step.name == KEEP else line.replace(KEPT_NAME, WRITTEN_NAME)
        lines.append(f"        {line}")
        classes = arguments.get("classes", classes)
    return TASK_LAYOUT.format(
        init=init,
        lines="\n".join(lines),
        arguments=", ".join(inputs),
        inputs=", ".join(
            f"torch.randint(0, {classes}, {shape})"
            if classes and name == "y"
            else f"torch.randn({', '.join(map(str, shape))})"
            for name, shape in inputs.items()
        ),
    )


def every_operator_matters(choices: Sequence[Choice], shape: Shape) -> bool:
    """Return whether the output of a chain is usable and leaving out any operator changes it.

    `choices` has the operators of the chain with the seeds of their arguments. The chain is tried on an input
    whose sizes are those of `shape`, but at most those in SMALL. Its arguments are drawn anew for that input.
    `passes_ablation` has the conditions. The result is false if the chain does not fit the small input.
    """
    small = tuple(min(size, limit) for size, limit in zip(shape, SMALL, strict=False))
    filled = fill(choices, small)
    if filled is None:
        return False
    steps, inputs = filled

    def run(chain: Sequence[Step], dtype: torch.dtype) -> Tensor:
        space: dict[str, Any] = {}
        names = {step.name for step in chain}
        if names.intersection(USES) and KEEP not in names:
            raise ValueError("nothing is kept")
        exec(write_tensor_source(chain, inputs), space)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(20260227)  # not those of GPUs, which takes longer
            tensors = [
                value.to(dtype) if value.is_floating_point() else value for value in space["get_inputs"]()
            ]
            model = space["Model"]().eval().to(dtype)
        for index, buffer in enumerate(model.buffers()):  # a fresh batch norm changes nothing
            buffer.copy_(0.5 + (buffer + index) / 4)
        output: Tensor = model(*tensors)
        return output

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about the deviation of a single number.
            return passes_ablation(
                steps, run, max_float32_error=1e-5, min_values=1, max_samples=2048, ablate_single=False
            )
    except (IndexError, KeyError):
        return False


def estimate_seconds(code: str, device: Device) -> float:
    """Estimate the eager time of one call of a task in seconds, in order to choose the size of its inputs.

    `code` is the source of a task that `write_tensor_source` has written.
    """
    program = read_program(code)
    assert program is not None
    product, element = SECONDS[device]
    seconds, shape = 0.0, program.shape
    for part in program.parts:
        if isinstance(part, Nest):
            is_product = any("@" in term for loop in part.code.loops for _, _, term in loop.folds)
            seconds += prod(axis.size for axis in part.axes) * (product if is_product else element)
            shape = part.shape
        else:
            seconds += prod(shape) * element
    return seconds


def compose_tensor_task(rng: random.Random, data: Data, device: Device) -> KernelTask:
    """Return a random task, a PyTorch module to be made faster, of one tensor operator or a chain of them.

    `rng` draws the number of operators (by data.operator_mix), the operators, their arguments, and the shape.
    Chains are drawn until the estimated eager time of one lies within data.eager_seconds, and after MAX_DRAWS
    draws a chain with any time is accepted. Raises UserError if data.numel permits no shape of rank 2 or
    more.
    """
    low, high = data.numel
    fault = f"data.numel: no shape of rank 2 or more has between {low} and {high} elements; widen it."
    refuse((not _permits_shapes(data.numel), fault))
    count = draw_weighted(rng, data.operator_mix)
    fastest, slowest = data.eager_seconds
    composed = [name for name, operator in OPERATORS.items() if operator.draw is not None]
    elementwise = [name for name in composed if name in LINES]
    attempts = draws = 0
    while True:
        if attempts % MAX_ATTEMPTS == 0:  # those of another kind may fit the limits of sizes and times
            kind = draw_weighted(rng, KINDS)
            firsts = [
                name
                for name in composed
                if _kind(name) == kind and name not in RESHAPES and (count == 1 or name not in LINES)
            ]
        attempts += 1
        shape = _draw_shape(rng, data.numel)
        names = [rng.choice(firsts)] + [
            rng.choice(elementwise if rng.random() < ELEMENTWISE_SHARE else composed)
            for _ in range(count - 1)
        ]
        if count > 3 and rng.random() < RESIDUAL_SHARE:
            first = rng.randrange(1, count - 2)
            names[first], names[rng.randrange(first + 2, count)] = KEEP, rng.choice(USES)
        choices = [Choice(name, rng.getrandbits(32)) for name in names]
        filled = fill(choices, shape)
        if filled is None or len(set(names)) < count:
            continue
        code = write_tensor_source(*filled)
        draws += 1
        measurable = 1.3 * fastest <= estimate_seconds(code, device) <= slowest / 1.3
        if (measurable or draws > MAX_DRAWS) and every_operator_matters(choices, shape):
            return composed_task(restyle(code, names, rng), tuple(names), data.held_out_seed)


def _kind(name: str) -> str:
    """Return the key in KINDS of the tensor operator `name`."""
    return "convolution" if name.startswith("conv") else "product" if name in PRODUCTS else "other"


def _draw_shape(rng: random.Random, numel: tuple[int, int]) -> Shape:
    """Return a random shape of rank 1 to 5, with a number of elements within `numel` if the rank is not 1.

    `numel` is (low, high), for which `_permits_shapes` must be true. Shapes of rank 1 are not limited.
    """
    while True:
        rank = draw_weighted(rng, RANKS)
        shape = tuple(rng.choice(sizes) for sizes in DIMENSIONS[rank])
        if rank > 3 and rng.random() < 0.5:
            shape = (*shape[:3], *shape[2:3] * (rank - 3))
        if rank == 2 and rng.random() < 0.2:
            shape = (shape[1], shape[1])
        if rank == 1 or numel[0] <= prod(shape) <= numel[1]:
            return shape


@cache
def _permits_shapes(numel: tuple[int, int]) -> bool:
    """Return whether a shape of rank 2 to 5 has a number of elements within `numel`, which is (low, high)."""
    shapes = itertools.chain.from_iterable(itertools.product(*DIMENSIONS[rank]) for rank in (2, 3, 4, 5))
    return any(numel[0] <= prod(shape) <= numel[1] for shape in shapes)
