"""Sizes with expressions: what a kernel would compute is the size's value."""

import operator
from collections.abc import Callable
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from components.bootstrap.size import Size, as_float, bare, calculated, ceil_div, literal, named

NAMES = {"X0": 7, "X1": 12, "X2": 30}
OPERATORS: tuple[Callable[[int, int], int], ...] = (operator.add, operator.mul, operator.floordiv)


def computed(text: str) -> int:
    """The value of a C++ expression of integers, in which a division is one of numbers that are positive."""
    return int(eval(text.replace("/", "//").replace("[", "(").replace("]", ")"), {}, NAMES))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(OPERATORS), st.sampled_from([*NAMES, "1", "2", "4", "5"]), st.booleans()),
        max_size=6,
    )
)
def test_an_expression_has_the_value_of_its_size(
    steps: list[tuple[Callable[[int, int], int], str, bool]],
) -> None:
    size: int = named("X1", NAMES["X1"])
    for combine, name, swapped in steps:
        other = named(name, NAMES[name]) if name in NAMES else int(name)
        left, right = (other, size) if swapped else (size, other)
        if combine is operator.floordiv and not right:
            continue
        size = combine(left, right)
        assert computed(str(size)) == computed(bare(size)) == size
        assert computed(f"100 - {size}") == 100 - size


def test_sizes_are_written_with_the_names_from_which_they_follow() -> None:
    shape = [named(name, value) for name, value in NAMES.items()]
    assert bare(prod(shape)) == "X0 * X1 * X2"
    assert prod(shape) // (shape[1] * shape[2]) == 7 and bare(prod(shape) // (shape[1] * shape[2])) == "X0"
    assert type(shape[0] // shape[0]) is int
    assert bare(ceil_div(prod(shape), 512)) == "(X0 * X1 * X2 + 511) / 512" and ceil_div(shape[0], 16) == 1
    assert f"{shape[0] - 4}" == "(X0 - 4)" and as_float(shape[0]) == "(float)X0" and as_float(3) == "3.0f"
    assert bare(literal(3) * literal(3)) == "3 * 3" and named("X3", 1) == 1
    assert not isinstance(named("X3", 1), Size)


def test_a_formula_of_numbers_is_a_number() -> None:
    assert calculated("({size} - 1) / {stride}", {"size": 9, "stride": 2}) == 4
    assert (
        f"{calculated('({size} - 1) / {stride}', {'size': named('X0', 7), 'stride': 2})}" == "[(X0 - 1) / 2]"
    )
