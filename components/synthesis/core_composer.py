"""Composition of tasks from the core operators (components/bootstrap/operator_chain.py).

A task is a PyTorch module that a policy has to make faster, and the core operators are those for which the
rule-based kernel writer can write kernels. A task is a chain of operators with matching shapes and dtypes,
which is written as a self-contained module. A chain becomes a task only if its output on a small input
varies, and changes when any one of its operators is left out. For example, a relu after a square has no
effect, so no task has this sequence.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from components.bootstrap.operator_chain import (
    BEGINNINGS,
    BY_NAME,
    COLS,
    CORE_OPERATORS,
    ROWS,
    TASK_LAYOUT,
    CoreOperator,
)
from components.core.errors import refuse
from components.core.params import Data
from components.core.records import Device, TaskDtype
from components.core.task import KernelTask, cast_task
from components.synthesis.contamination import EvaluationPrograms
from components.synthesis.mined_operators import function_of
from components.synthesis.operator_ablation import (
    PROBE,
    composed_task,
    draw_weighted,
    passes_ablation,
    probe,
)
from components.synthesis.tensor_composer import compose_tensor_task

# Number of draws after which a chain is accepted although no size has an estimated eager time within
# data.eager_seconds.
MAX_DRAWS = 200
# Largest number of shapes of a task with workloads.
MOST_SHAPES = 4
# Type of a step: the name of an operator, and its constants as texts for the source.
Step = tuple[str, tuple[str, ...]]
Steps = tuple[Step, ...]


def write_source(steps: Steps, *shapes: tuple[int, int]) -> str:
    """Return the Python source of a task that applies the steps in order to inputs of shape [rows, cols].

    A step is the name of a core operator and its constants as texts. If there is more than one shape, the
    source lists them as workloads, which are calls of `get_inputs` with the arguments rows and cols.
    """
    operators = [BY_NAME[name] for name, _ in steps]
    rows, cols = shapes[0]
    init = "".join(f"        {operator.init.format(cols=cols)}\n" for operator in operators if operator.init)
    lines = "\n".join(f"        x = {BY_NAME[name].line.format(*constants)}" for name, constants in steps)
    has_second_input = any(operator.kind == "second_input" for operator in operators)
    size = f"{rows}, {cols}" if len(shapes) == 1 else "rows, cols"
    source = TASK_LAYOUT.format(
        init=init,
        lines=lines,
        arguments="x, y" if has_second_input else "x",
        inputs=", ".join([f"torch.randn({size})"] * (2 if has_second_input else 1)),
    )
    for usual, changed in BEGINNINGS if len(shapes) > 1 else ():
        source = source.replace(usual, changed.format(workloads=list(shapes)))
    return source


@functools.cache
def _modules(dtype: torch.dtype) -> SimpleNamespace:
    cols = PROBE[1]
    generator = torch.Generator().manual_seed(cols)
    return SimpleNamespace(
        layer_norm=nn.LayerNorm(cols, dtype=dtype),
        rms_norm=nn.RMSNorm(cols, eps=1e-5, dtype=dtype),
        scale=torch.randn(cols, generator=generator).to(dtype),
        shift=torch.randn(cols, generator=generator).to(dtype),
    )


_probe = functools.cache(probe)


def every_operator_matters(steps: Steps) -> bool:
    """Return whether the output of a chain is usable and every operator of the chain changes it.

    `steps` is the chain: the name of each operator and its constants as texts. It is tried on an input of the
    shape PROBE. Leaving out any operator must change the output by at least 1 % of its root mean square, or
    its shape, as a reduction does. The output must also vary between elements and be precise in float32
    (`passes_ablation`).
    """

    def run(chain: Sequence[Step], dtype: torch.dtype) -> Tensor:
        x, y = _probe(PROBE, dtype)
        for name, constants in chain:
            call = BY_NAME[name].line.format(*constants)
            x = function_of(call)(x, y, _modules(dtype))
        return x

    return passes_ablation(
        steps,
        run,
        max_float32_error=1e-6,
        min_values=1,
        max_samples=PROBE[0] * PROBE[1] + 1,
        ablate_single=True,
    )


def _is_well_formed(operators: Sequence[CoreOperator]) -> bool:
    """Return whether the rule-based kernel writer supports a chain of these operators.

    A row operator computes along the last dimension and keeps the shape, a reduction returns one value for
    each row, a parameter operator uses a parameter with one value for each column, and a second-input
    operator the second input of the task. In a supported chain each row operator and each parameter operator
    occurs at most once. There is at most one second-input operator, at most one reduction, and at most two
    row operators and reductions together. Only elementwise operators follow a reduction, and no operator
    follows itself.
    """
    kinds = [operator.kind for operator in operators]
    once = [operator.name for operator in operators if operator.kind in ("row", "parameter")]
    after = itertools.dropwhile(lambda kind: kind != "reduction", kinds)
    return (
        len(set(once)) == len(once)
        and kinds.count("second_input") <= 1
        and kinds.count("reduction") <= 1
        and kinds.count("row") + kinds.count("reduction") <= 2
        and not any(one == following for one, following in itertools.pairwise(operators))
        and set(after) <= {"reduction", "elementwise"}
    )


def _shapes(data: Data) -> list[tuple[int, int]]:
    """Return the pairs (rows, columns) of ROWS and COLS whose product lies within data.numel.

    Raises UserError if there is no such pair.
    """
    low, high = data.numel
    shapes = [(rows, cols) for cols in COLS for rows in ROWS if low <= rows * cols <= high]
    composed = f"{ROWS[0]}x{COLS[0]} to {ROWS[-1]}x{COLS[-1]} are composed"
    refuse((not shapes, f"data.numel: no shape between {low} and {high} elements ({composed}); widen it."))
    return shapes


def estimate_eager_seconds(steps: Steps, device: Device) -> float:
    """Estimate the eager time of one call of a chain in seconds for each element of the input.

    `steps` is the chain: the name of each core operator and its constants. The estimate is used to choose the
    size of a task, whose time the judge then measures.
    """
    nanoseconds = 0.0
    for name, _ in steps:
        # On a GPU, each eager operator is assumed to read and write every element at 3 TB/s.
        nanoseconds += BY_NAME[name].cost if device == "cpu" else 8 / 3000
        if BY_NAME[name].kind == "reduction":
            break  # the operators after it have one value for each row, which takes no time
    return 1e-9 * nanoseconds


def compose_task(rng: random.Random, data: Data, device: Device = "cpu") -> KernelTask:
    """Return a random task, a PyTorch module to be made faster, that is a chain of core operators.

    `rng` draws the operators, their number (according to data.operator_mix), constants and shape. Chains are
    drawn until one has a shape whose estimated eager time lies within data.eager_seconds, and after MAX_DRAWS
    draws any shape is accepted. For the share data.workload_share of the tasks, up to `MOST_SHAPES` shapes
    are drawn, each of which is a workload (a call of `get_inputs`). The field `ops` has the operators in
    their order, `data_source` is torch#N for N operators, and `split` is that of `split_of`. Raises UserError
    if data.numel permits no shape.
    """
    shapes, count = _shapes(data), draw_weighted(rng, data.operator_mix)
    fastest, slowest = data.eager_seconds[0] * 1.3, data.eager_seconds[1] / 1.3
    has_workloads = data.workload_share > 0 and rng.random() < data.workload_share
    for draw in itertools.count():
        operators = [rng.choice(CORE_OPERATORS) for _ in range(count)]
        if not _is_well_formed(operators):
            continue
        steps = tuple(
            (operator.name, tuple(rng.choice(palette) for palette in operator.constants))
            for operator in operators
        )
        seconds = estimate_eager_seconds(steps, device)
        measurable = [shape for shape in shapes if fastest <= shape[0] * shape[1] * seconds <= slowest]
        if not measurable and draw < MAX_DRAWS:
            continue
        chosen = [rng.choice(measurable or shapes)]
        if has_workloads:
            # Parameters have one value for each column.
            has_parameters = any(operator.init for operator in operators)
            others = [
                shape
                for shape in measurable
                if shape != chosen[0] and (not has_parameters or shape[1] == chosen[0][1])
            ]
            chosen += rng.sample(others, min(len(others), MOST_SHAPES - 1))
            if not others and draw < MAX_DRAWS:
                continue
        if every_operator_matters(steps):
            break
    return composed_task(write_source(steps, *chosen), tuple(name for name, _ in steps), data.held_out_seed)


def compose_tasks(seed: int, data: Data, device: Device = "cpu") -> Iterator[KernelTask]:
    """Yield composed tasks (PyTorch modules to be made faster) without end; equal arguments give equal tasks.

    The tasks are made of the core operators, for which the rule-based kernel writer has rules, or of tensor
    operators (tensor_composer.py) if data.operators is `kernelbench`. The share data.half_share of them is
    cast to half precision. `device` is used to estimate their times.
    """
    compose: Callable[[random.Random, Data, Device], KernelTask] = compose_task
    if data.operators == "kernelbench":
        compose = compose_tensor_task
    rng = random.Random(seed)
    tasks = (compose(rng, data, device) for _ in itertools.count())
    return map(cast_task, tasks, draw_dtypes(seed, data.half_share))


def draw_dtypes(seed: int, half_share: float) -> Iterator[TaskDtype]:
    """Yield random dtypes without end; equal arguments give the same sequence.

    The probability of half precision is `half_share`, of which float16 and bfloat16 have one half each. All
    other dtypes are float32.
    """
    rng = random.Random(f"half precision {seed}")
    dtypes: tuple[TaskDtype, ...] = ("float16", "bfloat16", "float32")
    while True:
        yield rng.choices(dtypes, (half_share / 2, half_share / 2, 1 - half_share))[0]


def compose_training_tasks(seed: int, data: Data, device: Device) -> Iterator[KernelTask]:
    """Yield composed tasks without end that a policy may learn from.

    Tasks whose operator sequence is held out for evaluation are left out, and so are those that are too
    similar to an evaluation program (data.against, data.max_similarity). The arguments are those of
    `compose_tasks`, and equal arguments give equal tasks. Raises UserError if a path of data.against cannot
    be read.
    """
    programs = EvaluationPrograms(data.against)
    return (
        task
        for task in compose_tasks(seed, data, device)
        if task.split == "train" and programs.nearest(task.code)[0] <= data.max_similarity
    )
