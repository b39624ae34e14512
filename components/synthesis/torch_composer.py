"""Composing tasks from the mined table: chains of torch operators by shape, dtype and layout, and modules of transformers.

What fits is asked of meta tensors: each form is applied to the shape and strides that the one before it left, so that a
transposed tensor only reaches operators that take one. A chain is kept when, on small real tensors, its output varies
and changes with every operator left out; its size is then searched so that the guessed eager time falls into the window.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from components.core.config import Data, Device
from components.core.errors import UserError
from components.core.task import KernelTask
from components.synthesis import mine_transformers
from components.synthesis.compose import SOURCE, is_held_out
from components.synthesis.core_operators import canonical
from components.synthesis.cost import OperatorCost, eager_seconds, operator_cost
from components.synthesis.mine_torch import probe
from components.synthesis.mined_operators import (
    FAULTS,
    SMALL,
    OperatorTable,
    OperatorTemplate,
    TransformersModule,
    apply,
    written,
)

RANKS = {2: 0.3, 3: 0.3, 4: 0.32, 5: 0.08}
"""Shares of the ranks of a chain's input."""
POWERS = tuple(2**power for power in range(0, 21))
WIDTHS = (64, 96, 128, 256, 384, 512, 768, 1024, 2048, 3072, 4096)
SIDES = (14, 28, 32, 56, 64, 112, 128, 224)
SIZES_TRIED = 5
LARGEST_BYTES = 1 << 30
"""Of any tensor of a chain, parameters too: those of nn.Bilinear grow with the product of its sides, and one of 17 GB asks for all of a GPU's memory."""
SAMPLED = 2048
"""Values of an output that are counted; sorting all of a large one cost more than everything else."""
FEATURES = (256, 512, 768, 1024, 2048)

Shape = tuple[int, ...]
Place = tuple[Shape, Shape]
"""Shape and strides."""


@dataclass(frozen=True)
class Draft:
    """A composed task, the size it was written for, and what it is made of."""

    task: KernelTask
    made_of: tuple[OperatorTemplate, ...] | TransformersModule
    shape: Shape
    flops: int | None
    """Floating-point operations of products and convolutions in one call; None where nothing counts them."""


class TorchComposer:
    """Composes without end; equal arguments give equal drafts."""

    def __init__(self, table: OperatorTable, data: Data, device: Device, *, modules: bool):
        self.data, self.device = data, device
        self.modules = table.modules if modules else ()
        self.rng = random.Random(data.seed)
        self.by_rank: dict[int, list[list[OperatorTemplate]]] = {}
        for rank in SMALL:
            groups: dict[str, list[OperatorTemplate]] = {}
            for form in table.templates:
                if rank in form.ranks:
                    groups.setdefault(canonical(form.name), []).append(form)
            self.by_rank[rank] = [groups[name] for name in sorted(groups)]
        self.shapes = {rank: _shapes(rank, data.numel) for rank in SMALL}
        self.block_shapes = [shape for shape in self.shapes[3] if shape[2] in FEATURES]
        if not all(self.shapes.values()) or not self.block_shapes:
            raise UserError(
                f"data.numel: no shape of every rank between {data.numel[0]} and {data.numel[1]} elements; widen it."
            )

    def __iter__(self) -> Iterator[Draft]:
        while True:
            yield self.compose()

    def compose(self) -> Draft:
        """One draft; the number of operators is drawn by data.operator_mix, transformers by data.transformers_share."""
        if self.modules and self.rng.random() < self.data.transformers_share:
            return self._module()
        mix = self.data.operator_mix
        count = self.rng.choices(list(mix), weights=list(mix.values()))[0]
        while True:
            draft = self._chain(count)
            if draft is not None:
                return draft

    def resized(self, draft: Draft, seconds: float) -> Draft | None:
        """The same task at the size that should bring its measured eager time into the middle of the window; None where
        no size that differs is near."""
        low, high = self.data.eager_seconds
        factor = math.sqrt(low * high) / max(seconds, 1e-7)
        shapes = (
            self.block_shapes
            if isinstance(draft.made_of, TransformersModule)
            else self.shapes[len(draft.shape)]
        )
        wanted = math.log(math.prod(draft.shape) * factor)
        near = sorted(shapes, key=lambda shape: (abs(math.log(math.prod(shape)) - wanted), shape))
        for shape in near[:SIZES_TRIED]:
            if abs(math.log(math.prod(shape)) - wanted) > math.log(2) or shape == draft.shape:
                continue
            if isinstance(draft.made_of, TransformersModule):
                return self._written_module(draft.made_of, shape)
            if _walk(draft.made_of, shape) is not None:
                return self._written(draft.made_of, shape)
        return None

    def _chain(self, count: int) -> Draft | None:
        rank = self.rng.choices(list(RANKS), weights=list(RANKS.values()))[0]
        chain: tuple[OperatorTemplate, ...] = ()
        place: Place = SMALL[rank], _contiguous(SMALL[rank])
        for _ in range(count):
            form = self.rng.choice(self.rng.choice(self.by_rank[len(place[0])]))
            twice = chain and canonical(chain[-1].name) == canonical(form.name)
            if twice or (form.second and any(other.second for other in chain)):
                return None
            met = operator_cost(form, *place)
            if met is None or _too_large(met.after[0], SMALL[rank]):
                return None
            chain += (form,)
            place = met.after
        if not every_operator_matters(chain, SMALL[rank]):
            return None
        for shape in self._likely(chain, rank):
            if self._measurable(chain, shape):
                return self._written(chain, shape)
        return None

    def _likely(self, chain: tuple[OperatorTemplate, ...], rank: int) -> list[Shape]:
        """A few shapes, first drawn from those where the time of the small shape, grown with the elements, is measurable."""
        fixed, growing = self._guess(chain, SMALL[rank])
        each = growing / math.prod(SMALL[rank])
        low, high = self.data.eager_seconds
        near = [
            shape for shape in self.shapes[rank] if low <= fixed + each * math.prod(shape) <= high
        ] or self.shapes[rank]
        return self.rng.sample(near, min(SIZES_TRIED, len(near)))

    def _measurable(self, chain: tuple[OperatorTemplate, ...], shape: Shape) -> bool:
        low, high = self.data.eager_seconds
        return 1.3 * low <= sum(self._guess(chain, shape)) <= high / 1.3

    def _guess(self, chain: tuple[OperatorTemplate, ...], shape: Shape) -> tuple[float, float]:
        """Eager seconds that are fixed, and that grow; infinite where the chain does not fit."""
        walked = _walk(chain, shape)
        if walked is None:
            return math.inf, math.inf
        guesses = [
            eager_seconds(form, met, self.device) for form, (_, met) in zip(chain, walked, strict=True)
        ]
        return sum(fixed for fixed, _ in guesses), sum(growing for _, growing in guesses)

    def _written(self, chain: tuple[OperatorTemplate, ...], shape: Shape) -> Draft:
        walked = _walk(chain, shape)
        assert walked is not None
        code = write_chain_source(chain, [before[0] for before, _ in walked])
        task = KernelTask(
            code=code, ops=tuple(form.name for form in chain), data_source=f"torch#{len(chain)}"
        )
        return Draft(self._reserved(task), chain, shape, sum(met.flops for _, met in walked))

    def _module(self) -> Draft:
        module = self.rng.choice(self.modules)
        return self._written_module(module, self.rng.choice(self.block_shapes))

    def _written_module(self, module: TransformersModule, shape: Shape) -> Draft:
        task = KernelTask(
            code=mine_transformers.write_module_source(module, *shape),
            ops=(f"transformers.{module.name}",),
            data_source="transformers",
        )
        return Draft(self._reserved(task), module, shape, None)

    def _reserved(self, task: KernelTask) -> KernelTask:
        return task.model_copy(
            update={"split": "held_out" if is_held_out(task.ops, self.data.seed) else "train"}
        )


def write_chain_source(chain: Sequence[OperatorTemplate], shapes: Sequence[Shape]) -> str:
    """The task's source; `shapes` are those of each operator's input."""
    init, lines, second = "", [], None
    for index, (form, shape) in enumerate(zip(chain, shapes, strict=False), 1):
        place = f"self.{form.name.rpartition('.')[2].lower()}_{index}"
        made, call = written(form, shape, place)
        init += f"        {place} = {made}\n" if made else ""
        lines.append(f"        x = {call}")
        second = shape if form.second else second
    inputs = [
        f"torch.randn({', '.join(map(str, shape))})" for shape in (shapes[0], second) if shape is not None
    ]
    return SOURCE.format(
        init=init,
        lines="\n".join(lines),
        arguments="x, y" if second is not None else "x",
        inputs=", ".join(inputs),
    )


@torch.no_grad()
def every_operator_matters(chain: Sequence[OperatorTemplate], shape: Shape) -> bool:
    """Whether the output varies, float32 suffices for it, and it changes by more than 1 % (RMS) when any one operator is
    left out: as `compose.every_operator_matters`, for mined forms."""
    try:
        out = _run(chain, shape, torch.float32)
        size = _rms(out)
        if out.numel() < 16 or not 1e-4 < size < 1e4 or out.std().item() < 3e-3 * size:
            return False
        some = out.flatten()[:: out.numel() // SAMPLED + 1]
        if torch.unique((some / size * 1000).round()).numel() < min(100, 0.6 * some.numel()):
            return False
        if _rms(out.double() - _run(chain, shape, torch.float64)) > 1e-5 * size:
            return False
        for index in range(len(chain) if len(chain) > 1 else 0):
            try:
                without = _run([*chain[:index], *chain[index + 1 :]], shape, torch.float32)
            except FAULTS:
                continue  # the rest does not fit without it, so it does matter
            if without.shape == out.shape and _rms(without - out) < 1e-2 * size:
                return False
    except FAULTS:
        return False
    return True


def _run(chain: Sequence[OperatorTemplate], shape: Shape, dtype: torch.dtype) -> Tensor:
    x, _ = probe(shape, dtype)
    for form in chain:
        x = apply(form, x, probe(tuple(x.shape), dtype)[1] if form.second else None)
    return x


def _rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def _walk(chain: Sequence[OperatorTemplate], shape: Shape) -> list[tuple[Place, OperatorCost]] | None:
    """What is before each operator, and what the operator does there; None where one does not fit at this size."""
    place, walked = (shape, _contiguous(shape)), []
    for form in chain:
        met = operator_cost(form, *place)
        if met is None or _too_large(met.after[0], shape) or met.largest > LARGEST_BYTES:
            return None
        walked.append((place, met))
        place = met.after
    return walked


def _too_large(shape: Shape, start: Shape) -> bool:
    """Whether a chain from `start` may not grow to this shape."""
    return math.prod(shape) > 4 * math.prod(start)


def _contiguous(shape: Shape) -> Shape:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _shapes(rank: int, numel: tuple[int, int]) -> list[Shape]:
    """Inputs of this rank inside data.numel: rows, sequences, images with equal sides, volumes."""
    axes: list[tuple[int, ...]]
    match rank:
        case 2:
            axes = [POWERS[3:], WIDTHS]
        case 3:
            axes = [POWERS[:8], (32, 64, 128, 256, 512, 1024, 2048, 4096), WIDTHS]
        case 4:
            axes = [POWERS[:8], (16, 32, 64, 128, 256), SIDES]
        case _:
            axes = [POWERS[:5], (8, 16, 32, 64), (8, 16, 32), (16, 28, 32, 56, 64)]
    shapes = [(*sizes, sizes[-1]) if rank >= 4 else sizes for sizes in itertools.product(*axes)]
    low, high = numel
    return [shape for shape in shapes if low <= math.prod(shape) <= high]
