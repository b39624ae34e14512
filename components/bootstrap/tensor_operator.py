"""The form of a row of the table of tensor operators, and how a composer draws common arguments."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from components.bootstrap.loop_nest import Line, Nest, Shape

Parts = Sequence[Nest | Line]
# Values of the arguments in an operator's source, by name. In what a composer draws, `inputs` has the shapes
# of the task's further inputs.
Arguments = dict[str, Any]
Draw = Callable[[random.Random, Shape], Arguments | None]
Drawn = Callable[[random.Random, Shape], Arguments]


@dataclass(frozen=True)
class TensorOperator:
    """One row of the table.

    `line` is the right-hand side of `x = …`, in which `{self}` is the attribute that the statement `init`
    creates, and the other fields are arguments. `build` is called with the shape of x, the shapes of the
    task's further inputs by name, the name of the attribute, and the arguments by name. It returns what
    computes the operator: nests, and lines for elementwise operators. `draw` returns arguments for an x of
    some shape, or None if the operator does not fit it; without it the operator is not composed.
    """

    line: str
    build: Callable[..., Parts]
    draw: Draw | None
    init: str = ""
    # Endings of the names of the entries of the state dict, in their order.
    state: tuple[str, ...] = ()
    # Ranks of x for which arguments can be drawn.
    ranks: tuple[int, ...] = (2, 3, 4, 5)


# Endings of the state of a module with a weight and a bias, and the ranks of elementwise operators.
AFFINE = ("_weight", "_bias")
ALL_RANKS = (1, 2, 3, 4, 5)


def constants_of(**palettes: Sequence[str]) -> Drawn:
    """Return the function that draws a constant from each palette."""
    return lambda rng, shape: {name: float(rng.choice(values)) for name, values in palettes.items()}


def same_shape(rng: random.Random, shape: Shape) -> Arguments:
    """Draw a second input with the shape of the first."""
    return {"inputs": {"y": shape}}


def channels(rng: random.Random, shape: Shape) -> Arguments:
    return {"channels": shape[1]}


def further_inputs(*names: str, **palettes: Sequence[str]) -> Drawn:
    """Return the function that draws further inputs of the same shape, and constants, for a loss."""

    def draw(rng: random.Random, shape: Shape) -> Arguments:
        return {"inputs": dict.fromkeys(names, shape), **constants_of(**palettes)(rng, shape)}

    return draw
