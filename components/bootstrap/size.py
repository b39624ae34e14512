"""Compute with sizes of tensors that know the C++ expressions from which they follow.

Kernels name the sizes of their inputs once and compute all others from these names, so a kernel for other
sizes differs only in the lines that give the names their values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


class Size(int):
    """An int with a C++ expression: `scale` times the product of `factors`, plus `offset`.

    Each factor is a name, a number, or an expression in parentheses or brackets. Sums and products with other
    ints, and quotients, are Sizes too, unless nothing but a number is left. All other operations return plain
    ints. Formatted, a Size is its expression, in parentheses if it is no single factor.
    """

    factors: tuple[str, ...]
    scale: int
    offset: int

    def __new__(cls, value: int, factors: Iterable[str], scale: int = 1, offset: int = 0) -> Size:
        size = super().__new__(cls, value)
        size.factors, size.scale, size.offset = tuple(factors), scale, offset
        return size

    @property
    def expression(self) -> str:
        """Return the C++ expression, with parentheses only around factors."""
        scale = [str(self.scale)] if self.scale != 1 or not self.factors else []
        text = " * ".join([*scale, *self.factors])
        sign = "-" if self.offset < 0 else "+"
        return f"{text} {sign} {abs(self.offset)}" if self.offset else text

    def __str__(self) -> str:
        single = self.scale == 1 and len(self.factors) == 1 and not self.offset
        return self.factors[0] if single else f"({self.expression})"

    def __format__(self, _: str) -> str:
        return str(self)

    def __add__(self, other: int) -> int:
        if not isinstance(other, int):
            return NotImplemented
        if isinstance(other, Size):
            return Size(int(self) + int(other), (f"({self.expression} + {other.expression})",))
        return Size(int(self) + other, self.factors, self.scale, self.offset + other)

    __radd__ = __add__

    def __sub__(self, other: int) -> int:
        return self + -other

    def __neg__(self) -> int:
        return Size(-int(self), self.factors, -self.scale, -self.offset)

    def __abs__(self) -> int:
        return self if self >= 0 else -self

    def __mul__(self, other: int) -> int:
        if not isinstance(other, int):
            return NotImplemented
        value = int(self) * int(other)
        if self.offset or not value:
            return value and Size(int(self), (f"({self.expression})",)) * other
        if isinstance(other, Size):
            if other.offset:
                return other * self
            return Size(value, self.factors + other.factors, self.scale * other.scale)
        return Size(value, self.factors, self.scale * other)

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        """Return the quotient, whose expression is right if neither of the two sizes is negative."""
        scale, factors = (other.scale, other.factors) if isinstance(other, Size) else (other, ())
        plain = not self.offset and not (isinstance(other, Size) and other.offset)
        if plain and self.scale % scale == 0 and Counter(factors) <= Counter(self.factors):
            left = list((Counter(self.factors) - Counter(factors)).elements())
            value = int(self) // int(other)
            return Size(value, left, self.scale // scale) if left else value
        return Size(int(self) // int(other), (f"({self} / {other})",))

    def __rfloordiv__(self, other: int) -> int:
        return Size(int(other) // int(self), (f"({other} / {self})",))


def named(name: str, value: int) -> int:
    """Return the Size of the C++ name `name`, or the plain value if it is less than 2."""
    return Size(value, (name,)) if value > 1 else value


def literal(value: int) -> int:
    """Return the Size that is written as its own number, so that products with it are written as products."""
    return named(str(value), value)


def calculated(formula: str, values: Mapping[str, int]) -> int:
    """Return the size that a formula gives, which is a C++ expression with the fields `{NAME}` for values.

    All quotients of the formula are exact or of numbers that are not negative. The result is a plain int if
    no value is a Size. Otherwise the Size has one factor, the expression in brackets, in whose place a kernel
    has a name.
    """
    plain = {name: int(value) for name, value in values.items()}
    size = int(eval(formula.replace("/", "//").format(**plain), {}))
    if not any(isinstance(value, Size) for value in values.values()):
        return size
    return Size(size, (f"[{formula.format(**values)}]",))


def as_float(size: int) -> str:
    """Return the C++ expression of a size as a number of the type float."""
    return f"(float){size}" if isinstance(size, Size) else f"{size}.0f"


def bare(size: int) -> str:
    """Return the C++ expression of a size without parentheses around it."""
    text = size.expression if isinstance(size, Size) else str(size)
    return text[1:-1] if isinstance(size, Size) and text == size.factors[0] and text[0] == "(" else text


def ceil_div(size: int, by: int) -> int:
    """Return how many parts of `by` elements cover `size` elements."""
    return size if by == 1 else 1 if size <= by else (size + (by - 1)) // by
