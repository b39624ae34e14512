"""Rewrite a user's module in the layout of composed tasks, which has one line `x = …` for each operator.

Composed tasks are chains of operators that components/synthesis/core_composer.py writes. Rewriting is needed
for policies with the compact prompt, because they are trained on this layout only (TASK_LAYOUT in
operator_chain.py). Names, intermediate variables, named sizes, methods, activation modules and the order of
operands are normalised. The result is used only as the prompt. The judge compares kernels with the user's own
module.
"""

import re

from components.bootstrap.operator_chain import CORE_OPERATORS, NUMBER, SOURCE, TASK_LAYOUT, read_chain
from components.bootstrap.source_names import plain_layout
from components.bootstrap.spelling import spellings
from components.bootstrap.tensor_operators import SPELLINGS as TENSOR_SPELLINGS
from components.bootstrap.tensor_operators import read_program

# Names of attributes in composed tasks, by the class of the norm, or by the sign before a parameter.
NAMES = {"nn.LayerNorm": "layer_norm", "nn.RMSNorm": "rms_norm", "*": "scale", "+": "shift"}


def _pattern(line: str) -> re.Pattern[str]:
    """Return the pattern of an operator's line with any dimension and attribute, and integers or decimals."""
    text = re.escape(re.sub(r"\{\d\}", "NUMBER", line)).replace("NUMBER", NUMBER).replace("1\\.0", r"1(\.0)?")
    return re.compile(re.sub(r"self\\\.\w+", r"self\.\\w+", text.replace(r"dim=\-1", r"dim=-?\d+")))


SPELLINGS = spellings(
    (re.sub(r"self\.\w+", "self", re.sub(r"\{(\d)\}", r"c\1", op.line)) for op in CORE_OPERATORS),
    (op.init.partition(" = ")[2] for op in CORE_OPERATORS),
    (_pattern(op.line) for op in CORE_OPERATORS),
)


# A tuple of equal numbers, or of one number.
EQUAL_SIDES = re.compile(r"\((\d+)(?:(?:, \1)+|,)\)")


def canonicalize(code: str) -> str | None:
    """Return the source of an operator chain in the layout of composed tasks, or None for another source.

    The layout (TASK_LAYOUT in operator_chain.py) has one line `x = …` of forward for each operator of the
    chain. The operators are the core operators, or else the tensor operators (tensor_operators.py). A source
    of core operators that already has this layout is returned unchanged. In others, torch.rand is replaced by
    torch.randn, because the kernel does not depend on the distribution of the inputs.
    """
    if read_chain(code) is not None:
        return code
    source = SOURCE.fullmatch(plain_layout(code, SPELLINGS) or "")
    text = _normalized(source) if source is not None else None
    return text if text is not None and read_chain(text) is not None else _tensor_layout(code)


def _tensor_layout(code: str) -> str | None:
    """Return the source of a chain of tensor operators in the layout of composed tasks, or None for another.

    Attributes of the module have the names m0, m1 and so on, in the order in which the constructor makes
    them. Arguments of convolutions and pools that are equal for all dimensions are single numbers.
    """
    text = plain_layout(code, TENSOR_SPELLINGS)
    if text is None or read_program(code) is None:
        return None
    created = re.findall(r"^ {8}self\.(\w+) = ", text, re.MULTILINE)
    names = {name: f"m{index}" for index, name in enumerate(created)}
    text = re.sub(r"\bself\.(\w+)", lambda match: f"self.{names[match[1]]}", text)
    text = re.sub(".*(?:nn.Conv|_pool).*", lambda line: EQUAL_SIDES.sub(r"\1", line[0]), text)
    return text.replace("torch.rand(", "torch.randn(")


def _normalized(source: re.Match[str]) -> str | None:
    """Return a source, which is matched by SOURCE, with the names and numbers that composed tasks have.

    The dimension of an operator is -1 if it is the last one, and constants have a decimal point. The result
    is None if the source has an attribute that `forward` does not use, or that has no name in composed tasks.
    """
    created = dict(line.strip().partition(" = ")[::2] for line in source["init"].splitlines())
    inputs = source["inputs"].replace("torch.rand(", "torch.randn(")
    ranks = [sizes.count(",") + 1 for sizes in re.findall(r"torch\.randn\(([\d, ]+)\)", inputs)]
    renamed: dict[str, str] = {}
    lines = []
    for line in source["lines"].splitlines():
        if len(set(ranks)) == 1:
            line = re.sub(rf"\bdim={ranks[0] - 1}\b", "dim=-1", line)
        line = re.sub(r"(?<![-\w.=])(-?\d+)(?![\w.])", r"\1.0", line)
        if used := re.search(r"x = (?:x ([*+]) )?(self\.\w+)", line):
            kind = used[1] or created.get(used[2], "").partition("(")[0]
            name = renamed.setdefault(used[2], f"self.{NAMES.get(kind)}")
            line = line.replace(used[2], name)
        lines.append(line)
    if renamed.keys() != created.keys() or len(set(renamed.values())) != len(renamed):
        return None
    init = "".join(f"        {renamed[name]} = {text}\n" for name, text in created.items())
    return TASK_LAYOUT.format(
        init=init.replace("1e-05", "1e-5"),
        arguments=source["arguments"],
        lines="\n".join(lines),
        inputs=inputs,
    )
