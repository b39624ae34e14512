"""Composition of tasks from the mined table: chains of torch operators, and modules of transformers.

A task is a PyTorch module that a policy has to make faster. The table (mined_operators.py) has templates,
each of which is the source of one call of an operator, and modules. To find out whether a template fits, it
is applied to a meta tensor with the shape and strides of the output of the template before it. A chain is
kept if its output on small tensors varies, and changes when any operator is left out. The size of the inputs
is chosen so that the estimated eager time lies within data.eager_seconds.
"""

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from components.bootstrap.loop_nest import Shape, strides_of
from components.bootstrap.operator_chain import CORE_OPERATORS, TASK_LAYOUT, canonical
from components.core.errors import refuse
from components.core.params import Data
from components.core.records import Device
from components.core.task import KernelTask
from components.synthesis.mined_operators import (
    SMALL,
    OperatorTable,
    OperatorTemplate,
    apply_template,
    fill_template,
    output_layout,
    write_module_source,
)
from components.synthesis.operator_ablation import composed_task, draw_weighted, passes_ablation, probe

# Probabilities of the ranks of a chain's input.
RANKS = {2: 0.3, 3: 0.3, 4: 0.32, 5: 0.08}
# Sizes that the axes of inputs may have.
POWERS = tuple(2**power for power in range(0, 21))
WIDTHS = (64, 96, 128, 256, 384, 512, 768, 1024, 2048, 3072, 4096)
SIDES = (14, 28, 32, 56, 64, 112, 128, 224)
# Sizes of the axes of rows, sequences, images and volumes, by rank. The last two axes of an image or a volume
# have equal sizes.
AXES: dict[int, tuple[tuple[int, ...], ...]] = {
    2: (POWERS[3:], WIDTHS),
    3: (POWERS[:8], (32, 64, 128, 256, 512, 1024, 2048, 4096), WIDTHS),
    4: (POWERS[:8], (16, 32, 64, 128, 256), SIDES),
    5: (POWERS[:5], (8, 16, 32, 64), (8, 16, 32), (16, 28, 32, 56, 64)),
}
# Largest number of input shapes that are tried for one chain.
MAX_SIZES_TRIED = 5
# Largest number of bytes of a tensor in a chain, including parameters. The limit is needed because, for
# example, the parameters of nn.Bilinear grow with the product of its sizes.
MAX_TENSOR_BYTES = 1 << 30
# Hidden sizes of the inputs of transformers modules.
FEATURES = (256, 512, 768, 1024, 2048)

# Type of the layout of a tensor: its shape and its strides.
Layout = tuple[Shape, Shape]
# Names of the torch operators that only make a view.
VIEWS = frozenset(
    (
        "view _unsafe_view reshape expand permute transpose t unsqueeze squeeze select slice "
        "alias detach as_strided split unbind"
    ).split()
)
# Eager nanoseconds for one element on one CPU core, by the canonical name of the operator.
NANOSECONDS = {canonical(f"F.{core.name}"): core.cost for core in CORE_OPERATORS}
NANOSECONDS |= {"cumsum": 0.95, "transpose": 0.55}
# Nanoseconds for one element that are assumed for every other operator.
OTHER_NANOSECONDS = 0.5
# Approximate number of floating-point operations per second of one CPU core.
CPU_FLOPS = 4e10
# Approximate FLOP/s, memory bandwidth in bytes/s, and seconds of one kernel launch of a GPU.
GPU_FLOPS, GPU_BANDWIDTH, GPU_LAUNCH = 4e13, 3e12, 4e-6


class OperatorCost(TorchDispatchMode):
    """A context manager that adds up the cost of the torch operators that are called in its block.

    The tensors may be meta tensors. Operators that only make a view cost nothing. `flops` is the number of
    floating-point operations of products and convolutions. `bytes` is the number of bytes of the inputs and
    outputs of all kernels. `calls` is the number of kernel launches, and `largest` is the number of bytes of
    the largest tensor, including parameters. `after` is the shape and the strides of the output, which
    `operator_cost` sets.
    """

    after: Layout

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = self.calls = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in VIEWS:
            sizes = [t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
            self.calls += 1
            self.bytes += sum(sizes)
            self.largest = max(self.largest, *sizes, 0)
            if counter := flop_registry.get(func.overloadpacket):
                self.flops += counter(*args, **(kwargs or {}), out_val=out)
        return out


@functools.lru_cache(maxsize=65536)
def operator_cost(template: OperatorTemplate, shape: Shape, stride: Shape) -> OperatorCost | None:
    """Return the cost of a template on a float32 input with this shape and these strides (in elements).

    A template is the source of one call of an operator. It is applied to meta tensors. The result is None if
    it cannot be applied to such an input (`output_layout`).
    """
    cost = OperatorCost()
    with cost:
        after = output_layout.__wrapped__(template, shape, stride)
    if after is None:
        return None
    cost.after = after
    return cost


def estimate_operator_seconds(
    template: OperatorTemplate, cost: OperatorCost, device: Device
) -> tuple[float, float]:
    """Estimate the eager seconds of an operator: those that do not depend on the input's size, and the rest.

    `template` is the source of the call of the operator. `cost` is its cost on one input, and the second
    number holds for the size of that input. The estimate is used to choose a size. On a GPU, the fixed part
    is the time of the kernel launches, which is nearly the whole time for a small input. On a CPU, the fixed
    part is 0.
    """
    if device == "cuda":
        return cost.calls * GPU_LAUNCH, cost.flops / GPU_FLOPS + cost.bytes / GPU_BANDWIDTH
    return 0.0, cost.flops / CPU_FLOPS + cost.bytes / 8e9 * NANOSECONDS.get(
        template.operator, OTHER_NANOSECONDS
    )


class TorchComposer:
    """An endless iterator over tasks, which are composed from the table of mined operators.

    A task is a PyTorch module to be made faster. The table has operators of torch and modules of transformers
    that tasks can use. Equal arguments give equal tasks. If `modules` is false, no tasks with modules of
    transformers are drawn. `device` is used to estimate times. The constructor raises UserError if data.numel
    permits no input shape of one of the ranks 2 to 5.
    """

    def __init__(self, table: OperatorTable, data: Data, device: Device, *, modules: bool):
        self.data, self.device = data, device
        self.modules = table.modules if modules else ()
        self.rng = random.Random(data.seed)
        by_operator = attrgetter("operator")
        templates = sorted(table.templates, key=by_operator)
        # The templates of each operator that can be applied to inputs of a rank, by the rank.
        self.by_rank = {
            rank: [
                list(group)
                for _, group in itertools.groupby((t for t in templates if rank in t.ranks), key=by_operator)
            ]
            for rank in SMALL
        }
        self.shapes = {rank: _shapes(rank, data.numel) for rank in SMALL}
        self.block_shapes = [shape for shape in self.shapes[3] if shape[2] in FEATURES]
        low, high = data.numel
        fault = f"data.numel: no shape of every rank between {low} and {high} elements; widen it."
        refuse((not all(self.shapes.values()) or not self.block_shapes, fault))

    def __iter__(self) -> Iterator[KernelTask]:
        while True:
            yield self.compose()

    def compose(self) -> KernelTask:
        """Return a task of a kind that is drawn at random.

        The kind is a module of transformers, or a chain with a number of operators. It is drawn according to
        data.transformers_share and data.operator_mix.
        """
        if self.modules and self.rng.random() < self.data.transformers_share:
            module = self.rng.choice(self.modules)
            code = write_module_source(module, *self.rng.choice(self.block_shapes))
            ops = (f"transformers.{module.name}",)
            return composed_task(code, ops, self.data.held_out_seed, "transformers")
        count = draw_weighted(self.rng, self.data.operator_mix)
        return next(filter(None, map(self._draw_chain, itertools.repeat(count))))

    def _draw_chain(self, count: int) -> KernelTask | None:
        rank = draw_weighted(self.rng, RANKS)
        chain: tuple[OperatorTemplate, ...] = ()
        shape = SMALL[rank]
        for _ in range(count):
            template = self.rng.choice(self.rng.choice(self.by_rank[len(shape)]))
            is_repeated = chain and chain[-1].operator == template.operator
            if is_repeated or (template.second and any(other.second for other in chain)):
                return None
            chain += (template,)
            walked = _walk(chain, SMALL[rank])
            if walked is None:
                return None
            shape = walked[-1][1].after[0]
        if not every_operator_matters(chain, SMALL[rank]):
            return None
        low, high = self.data.eager_seconds
        measurable = (
            shape
            for shape in self._likely(chain, rank)
            if 1.3 * low <= sum(self._estimate(chain, shape)) <= high / 1.3
        )
        return next((self._write_chain(chain, shape) for shape in measurable), None)

    def _likely(self, chain: tuple[OperatorTemplate, ...], rank: int) -> list[Shape]:
        """Return up to MAX_SIZES_TRIED random input shapes with a likely time within data.eager_seconds.

        `chain` are the operators, and `rank` is the number of dimensions of their input. The eager time of
        one call is extrapolated from a small shape. If no shape has such a time, random shapes are returned.
        """
        fixed, growing = self._estimate(chain, SMALL[rank])
        each = growing / math.prod(SMALL[rank])
        low, high = self.data.eager_seconds
        near = [
            shape for shape in self.shapes[rank] if low <= fixed + each * math.prod(shape) <= high
        ] or self.shapes[rank]
        return self.rng.sample(near, min(MAX_SIZES_TRIED, len(near)))

    def _estimate(self, chain: tuple[OperatorTemplate, ...], shape: Shape) -> tuple[float, float]:
        """Estimate the eager seconds of a chain that do not depend on the input's size, and those that do.

        `shape` is the shape of the input. Both numbers are infinite if the chain cannot be applied to it, or
        if a tensor in the chain becomes too large.
        """
        walked = _walk(chain, shape)
        if walked is None:
            return math.inf, math.inf
        estimates = [
            estimate_operator_seconds(template, cost, self.device)
            for template, (_, cost) in zip(chain, walked, strict=True)
        ]
        return sum(fixed for fixed, _ in estimates), sum(growing for _, growing in estimates)

    def _write_chain(self, chain: tuple[OperatorTemplate, ...], shape: Shape) -> KernelTask:
        walked = _walk(chain, shape)
        assert walked is not None
        code = write_chain_source(chain, [before[0] for before, _ in walked])
        return composed_task(code, tuple(template.name for template in chain), self.data.held_out_seed)


def write_chain_source(chain: Sequence[OperatorTemplate], shapes: Sequence[Shape]) -> str:
    """Return the Python source of a task that applies the templates of a chain in order.

    A template is the source of one call of an operator. `shapes` has the shape of the input of each template.
    """
    init, lines, second = "", [], None
    for index, (template, shape) in enumerate(zip(chain, shapes, strict=False), 1):
        attribute = f"self.{template.name.rpartition('.')[2].lower()}_{index}"
        value, call = fill_template(template, shape, attribute)
        init += f"        {attribute} = {value}\n" if value else ""
        lines.append(f"        x = {call}")
        second = shape if template.second else second
    return TASK_LAYOUT.format(
        init=init,
        lines="\n".join(lines),
        arguments="x, y" if second is not None else "x",
        inputs=", ".join(
            f"torch.randn({', '.join(map(str, shape))})" for shape in (shapes[0], second) if shape is not None
        ),
    )


def every_operator_matters(chain: Sequence[OperatorTemplate], shape: Shape) -> bool:
    """Return whether the output of a chain is usable and leaving out any operator changes it.

    `chain` has the templates of the operators, which are the sources of their calls. `shape` is that of the
    small input on which the chain is tried. The change must be at least 1 % of the output's root mean square,
    or a change of its shape. The output must also vary between elements and be precise in float32
    (`passes_ablation`). The operator of a chain of one is not left out.
    """

    def run(templates: Sequence[OperatorTemplate], dtype: torch.dtype) -> Tensor:
        x, _ = probe(shape, dtype)
        for template in templates:
            x = apply_template(template, x, probe(tuple(x.shape), dtype)[1] if template.second else None)
        return x

    return passes_ablation(
        chain, run, max_float32_error=1e-5, min_values=16, max_samples=2048, ablate_single=False
    )


def _walk(chain: Sequence[OperatorTemplate], shape: Shape) -> list[tuple[Layout, OperatorCost]] | None:
    """Return for each operator of a chain the layout of its input (shape and strides) and its cost.

    `shape` is the shape of the chain's input, which is contiguous. Returns None if an operator cannot be
    applied to its input, if an output has more than four times as many elements as the chain's input, or if
    any tensor has more than MAX_TENSOR_BYTES.
    """
    layout, walked = (shape, strides_of(shape)), []
    for template in chain:
        cost = operator_cost(template, *layout)
        if cost is None or cost.largest > MAX_TENSOR_BYTES:
            return None
        walked.append((layout, cost))
        layout = cost.after
        if math.prod(layout[0]) > 4 * math.prod(shape):
            return None
    return walked


def _shapes(rank: int, numel: tuple[int, int]) -> list[Shape]:
    """Return the input shapes of this rank whose number of elements lies within `numel` (low, high).

    The sizes are those in AXES, and the last two sizes of a shape of rank 4 or 5 are equal.
    """
    shapes = ((*axes, axes[-1]) if rank >= 4 else axes for axes in itertools.product(*AXES[rank]))
    return [shape for shape in shapes if numel[0] <= math.prod(shape) <= numel[1]]
