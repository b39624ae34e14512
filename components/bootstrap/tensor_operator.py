"""Define the row of the table of tensor operators, and functions that draw arguments for operators.

A tensor operator is an operation on tensors of any shape, such as a convolution, for which kernels can be
written by rules. The table is in tensor_operators.py. A composer (components/synthesis/tensor_composer.py)
makes tasks of its rows with arguments that it draws.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from components.bootstrap.loop_nest import Line, Nest, Shape

Parts = Sequence[Nest | Line]
# Values of the arguments in an operator's source, by name. In what a composer draws, `inputs` has the shapes
# of the task's further inputs, and `classes` is the number of integers from which y is drawn if it is not of
# floats.
Arguments = dict[str, Any]
Draw = Callable[[random.Random, Shape], Arguments | None]
Drawn = Callable[[random.Random, Shape], Arguments]


@dataclass(frozen=True)
class TensorOperator:
    """One row of the table of tensor operators: how tasks write an operator, and what its kernels compute.

    `line` is the right-hand side of `x = …` in a task's forward. In it, `{self}` is the attribute to which
    the constructor assigns the expression `init` (empty if there is none), and the other fields in braces are
    arguments. `state` has the endings of the names of this attribute's entries in the state dict, in their
    order, such as `_weight`.

    `build` is called with the shape of x, the shapes of the task's further inputs by name, the name of the
    attribute without `self.`, and the arguments by name. It returns what computes the operator: loop nests
    (loop_nest.py), and C++ lines for elementwise operators. `draw` is called with a random generator and the
    shape of x. It returns arguments by name, of which `inputs` has the shapes of further inputs, or None if
    the operator does not fit the shape. If `draw` is None, no task is composed with the operator. `ranks` are
    the ranks of x that `build` supports, and `types` the C++ types of further inputs that it does.
    """

    line: str
    build: Callable[..., Parts]
    draw: Draw | None
    init: str = ""
    state: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (2, 3, 4, 5)
    types: tuple[str, ...] = ("float",)


# Endings of the state of a module with a weight and a bias, the ranks of elementwise operators, and the types
# of inputs.
AFFINE = ("_weight", "_bias")
ALL_RANKS = (1, 2, 3, 4, 5)
ALL_TYPES = ("float", "int64_t", "bool")


def constants_of(**palettes: Sequence[str]) -> Drawn:
    """Return a function that draws one value for each keyword from its palette.

    A palette has the permitted numbers as texts. The function takes a random generator and a shape, which it
    ignores, and returns floats by keyword. It is a `TensorOperator.draw`.
    """
    return lambda rng, shape: {name: float(rng.choice(values)) for name, values in palettes.items()}


def channels(rng: random.Random, shape: Shape) -> Arguments:
    """Return the argument `channels`, the size of the second dimension of x; `rng` is not used."""
    return {"channels": shape[1]}


def further_inputs(*names: str, **palettes: Sequence[str]) -> Drawn:
    """Return a function that draws the arguments of an operator with further inputs of the shape of x.

    `names` are the names of these inputs. The function takes a random generator and the shape of x. It
    returns the shapes of the inputs in the argument `inputs`, and for each keyword of `palettes` one of its
    numbers, which are texts, as a float.
    """
    constants = constants_of(**palettes)
    return lambda rng, shape: {"inputs": dict.fromkeys(names, shape), **constants(rng, shape)}
