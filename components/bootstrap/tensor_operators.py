"""Define the table of the tensor operators, and read the computation of a task that is a chain of them.

Tensor operators are what single operators and short chains of the kind of KernelBench's tasks are made of.
Each row of the table has the operator's line in the layout of composed tasks (TASK_LAYOUT), the loop nests
that compute it, and the arguments that a composer draws for it. `read_program` reads a source in that layout,
and nest_writer.py writes its kernels. Inputs have any rank, and dimensions any size. The rows of elementwise
operators are below, and the others in the files tensor_*.py.
"""

import ast
import random
import re
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from components.bootstrap.loop_nest import Code, Line, Nest, Shape, fits, over_dims
from components.bootstrap.operator_chain import CORE_OPERATORS, PALETTE, SLOPES, SOURCE
from components.bootstrap.operator_code import ELEMENTWISE
from components.bootstrap.size import literal, named
from components.bootstrap.source_names import plain_layout
from components.bootstrap.source_parts import UNREADABLE
from components.bootstrap.spelling import spellings
from components.bootstrap.tensor_losses import LOSSES
from components.bootstrap.tensor_norms import NORMS
from components.bootstrap.tensor_operator import (
    ALL_RANKS,
    ALL_TYPES,
    Arguments,
    Parts,
    TensorOperator,
    channels,
    constants_of,
    further_inputs,
)
from components.bootstrap.tensor_products import PRODUCTS
from components.bootstrap.tensor_reductions import ALONG, REDUCTIONS, RESHAPES
from components.bootstrap.tensor_sliding import SLIDING


@dataclass(frozen=True)
class Program:
    """The computation of a task: its parts, the shape of its first input, and the arguments of its kernel.

    `parts` are loop nests (loop_nest.py), and C++ lines for elementwise operators, in the order of
    computation. `shape` is the shape of the first input. `tensors` has the names of the kernel's arguments in
    their order, and `types` the C++ types of those that are not float, by name. `sizes` has the sizes of the
    inputs' dimensions by the names that they have in the kernel.
    """

    parts: tuple[Nest | Line, ...]
    shape: Shape
    tensors: tuple[str, ...]
    types: dict[str, str]
    sizes: dict[str, int]


# --- elementwise operators ----------------------------------------------------------------------------------


def _line(
    shape: Shape, inputs: dict[str, Shape], name: str, *, code: str, operand: str = "", **constants: Any
) -> Parts:
    """Return the C++ line of an elementwise operator, which is a `TensorOperator.build`.

    `code` is the line, which changes the element `v`. In it, `{NAME}` stands for the constant argument NAME,
    and `NAME@` for the element of the operand NAME. `operand` is the name of this operand: an input, or a
    parameter, whose name begins with `self`, for which `name` is put. It is empty if there is no operand.
    """
    of = constants.pop("size", inputs.get(operand, ()))
    of = (of,) if isinstance(of, int) else of
    if "channels" in constants:
        of = (constants.pop("channels"), *(1,) * (len(shape) - 2))
    values = {key: f"{float(value)!r}f" for key, value in constants.items()}
    text = re.sub(r"\{(\w+)\}f?", lambda match: values[match[1]], code)
    own = f"{name}{operand.removeprefix('self')}" if operand.startswith("self") else operand
    return [Line(text.replace(f"{operand}@", f"{own}@") if operand else text, own, of)]


def _parameter(rng: random.Random, shape: Shape) -> Arguments:
    """Draw the argument `size`, the shape of a parameter for an input of the shape `shape`.

    For an input of more than three dimensions, the parameter mostly has one value for each channel (the
    second dimension), and otherwise one for each index of the last dimension. In other cases, such a shape
    has a dimension of size 1 before it, or the parameter has a single value.
    """
    usual = (shape[1], *(1,) * (len(shape) - 2)) if len(shape) > 3 else (shape[-1],)
    others = [(), (1,), (1,) * len(usual), *([(1, *usual)] if len(usual) < len(shape) else [])]
    return {"size": usual if rng.random() < 0.7 else rng.choice(others)}


_PARAMETER = "nn.Parameter(torch.randn({size}))"
LINES: dict[str, TensorOperator] = {
    core.name: TensorOperator(
        re.sub(r"\{(\d)\}", r"{c\1}", core.line),
        partial(_line, code=re.sub(r"\{(\d)\}", r"{c\1}", ELEMENTWISE[core.name])),
        constants_of(**{f"c{index}": palette for index, palette in enumerate(core.constants)}),
        ranks=ALL_RANKS,
    )
    for core in CORE_OPERATORS
    if core.kind == "elementwise"
}
LINES |= {
    name: TensorOperator(line, partial(_line, code=code), constants_of(**palettes), ranks=ALL_RANKS)
    for name, line, code, palettes in (
        (
            "selu",
            "F.selu(x)",
            "v = 1.05070099f * (v < 0 ? 1.67326324f * (vexp(v) - 1) : v);",
            {},
        ),
        ("celu", "F.celu(x, alpha={a})", "v = v < 0 ? {a} * (vexp(v / {a}) - 1) : v;", {"a": SLOPES}),
        (
            "hardtanh",
            "F.hardtanh(x, min_val={a}, max_val={b})",
            "v = vmin(vmax(v, {a}), {b});",
            {"a": ("-2.0", "-1.0", "-0.5"), "b": ("0.5", "1.0", "2.0")},
        ),
        ("hardshrink", "F.hardshrink(x, {a})", "v = vabs(v) > {a} ? v : 0;", {"a": SLOPES}),
        (
            "gelu_tanh",
            'F.gelu(x, approximate="tanh")',
            "v = v * (1 + vtanh(0.79788456f * (v + 0.044715f * v * v * v))) / 2;",
            {},
        ),
        ("div_constant", "x / {a}", "v = v / {a};", {"a": PALETTE}),
        ("sub_constant", "x - {a}", "v = v - {a};", {"a": PALETTE}),
        ("clamp_min", "torch.clamp(x, min={a})", "v = vmax(v, {a});", {"a": SLOPES}),
        ("clamp_max", "torch.clamp(x, max={a})", "v = vmin(v, {a});", {"a": SLOPES}),
        ("sin", "torch.sin(x)", "v = std::sin(v);", {}),
        ("cos", "torch.cos(x)", "v = std::cos(v);", {}),
        ("exp_of_minus_abs", "torch.exp(-torch.abs(x))", "v = vexp(-vabs(v));", {}),
    )
}
LINES |= {
    name: TensorOperator(
        line, partial(_line, code=code, operand="self"), _parameter, _PARAMETER, ("",), ALL_RANKS
    )
    for name, line, code in (
        ("bias", "x + {self}", "v = v + self@;"),
        ("minus_bias", "x - {self}", "v = v - self@;"),
        ("scaling", "x * {self}", "v = v * self@;"),
        ("minimum", "torch.minimum(x, {self})", "v = vmin(v, self@);"),
        ("maximum", "torch.maximum(x, {self})", "v = vmax(v, self@);"),
    )
}
LINES |= {
    name: TensorOperator(
        f"x {sign} y",
        partial(_line, code=code, operand="y"),
        further_inputs("y"),
        ranks=ALL_RANKS,
        types=ALL_TYPES,
    )
    for name, sign, code in (
        ("add_input", "+", "v = v + y@;"),
        ("mul_input", "*", "v = v * y@;"),
        ("sub_input", "-", "v = v - y@;"),
    )
}
LINES["prelu"] = TensorOperator(
    "{self}(x)",
    partial(_line, code="v = v < 0 ? v * self_weight@ : v;", operand="self_weight"),
    channels,
    "nn.PReLU({channels})",
    ("_weight",),
)


def _keep(shape: Shape, inputs: dict[str, Shape], name: str, index: int) -> Parts:
    """Return the loop nest that keeps x, of the shape `shape`, under the number `index`."""
    return [replace(over_dims(shape, (), Code()), target=f"kept_{index}")]


def _take(shape: Shape, inputs: dict[str, Shape], name: str, index: int) -> Parts:
    """Return the loop nest that takes back what was kept under a number; `inputs` has its shape."""
    return [replace(over_dims(inputs[f"kept_{index}"], (), Code()), source=f"kept_{index}")]


def _with_kept(shape: Shape, inputs: dict[str, Shape], name: str, index: int, *, code: str) -> Parts:
    """Return the line of an elementwise operator of x and of a kept result, which is `y` in `code`."""
    kept = f"kept_{index}"
    return _line(shape, inputs, name, code=code.replace("y@", f"{kept}@"), operand=kept)


# Lines that keep a result for a later line, or use one (spelling.unfold); no task is composed with them.
KEPT = {
    name: TensorOperator(line, build, None, ranks=(0, *ALL_RANKS))
    for name, line, build in (
        ("keep", "keep(x, {index})", _keep),
        ("take", "kept_{index}", _take),
        ("add_kept", "x + kept_{index}", partial(_with_kept, code="v = v + y@;")),
        ("mul_kept", "x * kept_{index}", partial(_with_kept, code="v = v * y@;")),
        ("sub_kept", "x - kept_{index}", partial(_with_kept, code="v = v - y@;")),
        ("div_kept", "x / kept_{index}", partial(_with_kept, code="v = v / y@;")),
        ("sub_from_kept", "kept_{index} - x", partial(_with_kept, code="v = y@ - v;")),
        ("div_of_kept", "kept_{index} / x", partial(_with_kept, code="v = y@ / v;")),
    )
}
OPERATORS = KEPT | LINES | REDUCTIONS | ALONG | RESHAPES | NORMS | LOSSES | SLIDING | PRODUCTS


# --- reading ------------------------------------------------------------------------------------------------


# Pattern of a number, a tuple or list of numbers, or a truth value.
LITERAL = r"(?:True|False|-?\d[\d.]*(?:e-?\d+)?|[(\[][-\d., ]*[)\]])"


def _pattern(template: str) -> re.Pattern[str]:
    """Return the pattern of a line or a statement, with a named group for each field `{NAME}` of `template`.

    The field `{self}` matches an attribute such as `self.scale`, and any other field a number, a tuple or
    list of numbers, or a truth value. A field that occurs again matches only the same text. The first two
    dimensions may be exchanged instead of the last two, which is the same for matrices.
    """
    seen: set[str] = set()

    def group(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return f"(?P={name})"
        seen.add(name)
        return rf"(?P<{name}>self[.]\w+)" if name == "self" else rf"(?P<{name}>{LITERAL})"

    pattern = re.sub(r"\\\{(\w+)\\\}", group, re.escape(template))
    return re.compile(pattern.replace(re.escape("(-2, -1)"), r"\((?:-2, -1|0, 1)\)"))


PATTERNS = {name: (_pattern(row.line), _pattern(row.init)) for name, row in OPERATORS.items()}
SPELLINGS = spellings(
    (row.line for row in OPERATORS.values()),
    (row.init for row in OPERATORS.values()),
    (line for line, _ in PATTERNS.values()),
)
# Arguments of operators that are sizes of tensors. Kernels write products of them, and not their values.
LITERALS = {"ins", "outs", "kernel", "size"}
INPUT = re.compile(r"torch\.(randn?\(|randint\(0, \d+, \()([\d, ]+?),?\)+(\.bool\(\))?")


@lru_cache(maxsize=64)  # several kernels of a task are written one after the other
def read_program(code: str) -> Program | None:
    """Return the program of a source that can be written in the layout of composed tasks, or None.

    The layout is TASK_LAYOUT, which has one operator in each line of forward (`plain_layout`). The program
    has the loop nests and C++ lines that compute the task. Returns None also if a line of forward is not that
    of a tensor operator, if an input is not created by torch.rand, torch.randn or torch.randint, or if the
    kernel would be wrong for the shapes or the types of the inputs.
    """
    try:
        return _read(code)
    except UNREADABLE:
        return None


def _read(code: str) -> Program | None:
    source = SOURCE.fullmatch(plain_layout(code, SPELLINGS) or "")
    if source is None:
        return None
    names = source["arguments"].split(", ")
    texts = [INPUT.fullmatch(text) for text in re.split(r", (?=torch\.)", source["inputs"])]
    made = [re.fullmatch(r" {8}(self\.\w+) = (.+)|\s*", line) for line in source["init"].splitlines()]
    if None in (*texts, *made) or len(texts) != len(names):
        return None
    created = {match[1]: match[2] for match in made if match is not None and match[1]}
    found = [match for match in texts if match is not None]
    shapes: dict[str, Shape] = {
        name: tuple(
            named(f"{name.upper()}{index}", value)
            for index, value in enumerate(ast.literal_eval(f"({match[2]},)"))
        )
        for name, match in zip(names, found, strict=True)
    }
    given = {str(value): int(value) for shape in shapes.values() for value in shape if value > 1}
    types = {
        name: "bool" if match[3] else "int64_t"
        for name, match in zip(names, found, strict=True)
        if match[3] or match[1].startswith("randint")
    }
    shape, state = shapes["x"], {}
    parts: list[Nest | Line] = []
    for line in source["lines"].splitlines():
        step = _read_operator(line.strip().removeprefix("x = "), created)
        # What follows would read the integers of an input, or of an argmax, as floats.
        if step is None or types.keys() & {"x", "out"}:
            return None
        operator, attribute, arguments = step
        name = _kernel_name(attribute)
        sizes = {**shapes, "x": shape, attribute: arguments.get("size", ())}
        exchanged = re.findall(r"([\w.]+)\.transpose\(0, 1\)", line)
        if len(shape) not in operator.ranks or any(len(sizes[key]) != 2 for key in exchanged):
            return None
        new = operator.build(shape, {key: of for key, of in shapes.items() if key != "x"}, name, **arguments)
        state[attribute] = [
            f"{name}{end}" for end in operator.state if end != "_bias" or arguments.get("bias", True)
        ]
        parts += new
        for part in new:
            operands = part.operands if isinstance(part, Nest) else (part.operand,)
            is_wider = isinstance(part, Line) and not fits(part.shape, shape)
            if is_wider or any(types.get(key, "float") not in operator.types for key in operands):
                return None
            if isinstance(part, Nest):
                shape = part.shape
                shapes |= {part.target: shape} if part.target else {}
                types |= {"out": part.code.type} if part.code.type != "float" else {}
    if parts and isinstance(parts[-1], Nest) and parts[-1].is_name:
        return None
    direct = sorted(created, key=lambda key: not created[key].startswith("nn.Parameter"))
    # The kernel also takes a parameter that is not used; the tensors of a module would not be known.
    unused = {key: [_kernel_name(key)] for key in direct if created[key].startswith("nn.Parameter")}
    tensors = (*names, *(entry for key in direct for entry in (unused | state)[key]), "out")
    return Program(tuple(parts), shapes["x"], tensors, types, given)


def _kernel_name(attribute: str) -> str:
    """Return the name that kernels have for an attribute, such as p_scale for self.scale.

    With the prefix it is no keyword of C++, and no name that kernels have for anything else.
    """
    return attribute.replace("self.", "p_")


def uses_operator(code: str, name: str) -> bool:
    """Return whether a line of the source `code` is that of the tensor operator `name`.

    If the operator has a module or a parameter, a line of the constructor must create it, too. The result is
    False if there is no operator `name`.
    """
    line, init = PATTERNS.get(name, (None, None))
    texts = [
        text.strip().partition(" = ")[2] for text in (plain_layout(code, SPELLINGS) or code).splitlines()
    ]
    return all(any(map(pattern.fullmatch, texts)) for pattern in (line, init) if pattern) and line is not None


def _read_operator(line: str, created: dict[str, str]) -> tuple[TensorOperator, str, Arguments] | None:
    """Return the tensor operator of a line, or None if it is not that of an operator.

    `line` is the right-hand side of `x = …`, and `created` has the right-hand sides of the statements of the
    constructor by attribute, such as `self.scale`. The result is the row of the table, the attribute that the
    line uses (empty if none), and the operator's arguments by name.
    """
    for name, (pattern, init) in PATTERNS.items():
        match = pattern.fullmatch(line)
        if match is None:
            continue
        values = match.groupdict()
        attribute = values.pop("self", "")
        if made := init.fullmatch(created.get(attribute, "")):
            arguments = {key: ast.literal_eval(text) for key, text in {**values, **made.groupdict()}.items()}
            for key in LITERALS & arguments.keys():
                value = arguments[key]
                arguments[key] = tuple(map(literal, value)) if isinstance(value, tuple) else literal(value)
            return OPERATORS[name], attribute, arguments
    return None
