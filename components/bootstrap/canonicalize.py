"""Rewrite a user's module in the layout of composed tasks, which has one line `x = …` for each operator.

Composed tasks are chains of operators that components/synthesis/core_composer.py writes. Rewriting is needed
for policies that are made from scratch, because they are trained on this layout only (TASK_LAYOUT in
operator_chain.py). Names, intermediate variables, named sizes, methods, activation modules and the order of
operands are normalised. The result is used only as the prompt. The judge compares kernels with the user's own
module.
"""

import ast
import copy
import re
from dataclasses import dataclass, field

from components.bootstrap.operator_chain import CORE_OPERATORS, PATTERNS, TASK_LAYOUT, read_chain
from components.core.text import parse_python
from components.core.workloads import assigns_workloads

# Names of torch functions as they are written in composed tasks, such as F.relu for relu.
QUALIFIED_NAMES = {
    name: f"{module}.{name}"
    for operator in CORE_OPERATORS
    for module, name in re.findall(r"(F|torch)\.(\w+)", operator.line)
}
# Names of torch functions by the lower-case name of the torch.nn module that computes the same. For example,
# leaky_relu has the key leakyrelu.
MODULE_FUNCTIONS = {name.replace("_", ""): name for name in QUALIFIED_NAMES}
TORCH_NAMESPACES = frozenset({"torch", "F", "nn.functional", "torch.nn.functional"})
# Keyword arguments that composed tasks pass as positional arguments, by function.
POSITIONAL_CONSTANTS = {
    "leaky_relu": ("negative_slope",),
    "softshrink": ("lambd",),
    "clamp": ("min", "max"),
}
# Functions along one dimension, which composed tasks pass as the keyword argument `dim`.
DIM_FUNCTIONS = frozenset({"softmax", "log_softmax", "normalize", "sum", "mean", "amax", "logsumexp"})
# Names of the attributes that hold norms in composed tasks, by the class of the norm.
NORMS = {"nn.LayerNorm": "layer_norm", "nn.RMSNorm": "rms_norm"}

# Expressions by the names or attributes that they are assigned to.
Names = dict[str, ast.expr]


class _NotAChain(Exception):
    """Error raised if a source is no chain of known operators, applied to `x` one after another."""


def canonicalize(code: str) -> str | None:
    """Return the source of an operator chain in the layout of composed tasks, or None for another source.

    The layout (TASK_LAYOUT in operator_chain.py) has one line `x = …` of forward for each operator of the
    chain. A source that already has this layout is returned unchanged.
    """
    if read_chain(code) is not None:
        return code
    try:
        text = _rewrite(parse_python(code))
    except (_NotAChain, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text if read_chain(text) is not None else None


def _rewrite(tree: ast.Module) -> str:
    """Return the source of a module in the layout of composed tasks, for a module with a class Model.

    The layout has one line `x = …` of `forward` for each operator. Raises _NotAChain if `forward` of the
    class or get_inputs is missing, if `forward` has not one or two inputs, if it is not a chain of known
    operators, or if the module names workloads (several calls of get_inputs), which this layout has no place
    for.
    """
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    model = next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model"), None
    )
    methods = {node.name: node for node in model.body if isinstance(node, ast.FunctionDef)} if model else {}
    if "forward" not in methods or "get_inputs" not in functions or any(map(assigns_workloads, tree.body)):
        raise _NotAChain
    constants = {
        name: value
        for statement in tree.body
        for name, value in _assigned_names(statement).items()
        if _is_number(value)
    }
    inputs, rank = _inputs(_returned_expression(functions["get_inputs"].body, dict(constants)))
    init_arguments = (
        _returned_expression(functions["get_init_inputs"].body, dict(constants))
        if "get_init_inputs" in functions
        else ast.List([])
    )
    attributes = _attributes(methods["__init__"], init_arguments, constants) if "__init__" in methods else {}
    arguments = [argument.arg for argument in methods["forward"].args.args[1:]]
    if not 1 <= len(arguments) <= 2:
        raise _NotAChain
    names = constants | {name: ast.Name(letter) for name, letter in zip(arguments, "xy", strict=False)}
    speller = _Speller(attributes, rank)
    steps = _unfold(speller.visit(_returned_expression(methods["forward"].body, names)))
    return TASK_LAYOUT.format(
        init="".join(f"        {line}\n" for line in speller.init()).replace("1e-05", "1e-5"),
        arguments=", ".join("xy"[: len(arguments)]),
        lines="\n".join(f"        x = {step}" for step in steps),
        inputs=", ".join(inputs),
    )


# --- names --------------------------------------------------------------------------------------------------


def _is_number(node: ast.expr) -> bool:
    """Return whether the node is a number with or without a minus sign."""
    node = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _assigned_names(statement: ast.stmt) -> Names:
    """Return the names that an assignment binds, with their expressions.

    Only `a = …` and `a, b = …, …` are supported. The result is empty for other statements.
    """
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return {}
    target, value = statement.targets[0], statement.value
    pairs = (
        zip(target.elts, value.elts, strict=True)
        if isinstance(target, ast.Tuple)
        and isinstance(value, ast.Tuple)
        and len(target.elts) == len(value.elts)
        else [(target, value)]
    )
    return {name.id: bound for name, bound in pairs if isinstance(name, ast.Name)}


@dataclass
class _Substitution(ast.NodeTransformer):
    """A transformer that replaces names by expressions.

    A number or a name may be used several times. Any other expression is used at most once, because a chain
    has no branches.
    """

    names: Names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a name of `names` by its expression, and leave any other name.

        An expression that is neither a number nor a name is removed from `names`, so that it is used only
        once.
        """
        value = self.names.get(node.id)
        if value is None:
            return node
        return (
            copy.deepcopy(value)
            if _is_number(value) or isinstance(value, ast.Name)
            else self.names.pop(node.id)
        )


def _returned_expression(body: list[ast.stmt], names: Names) -> ast.expr:
    """Return the expression that statements without branches return, after substituting names in it.

    Replaced are the names of `names` and those that the statements assign, which are added to `names`. Raises
    _NotAChain for other statements.
    """
    for statement in body:
        if isinstance(statement, ast.Return) and statement.value is not None:
            returned: ast.expr = _Substitution(names).visit(statement.value)
            return returned
        bound = _assigned_names(statement)
        if bound:
            names |= {name: _Substitution(names).visit(value) for name, value in bound.items()}
        elif not _is_docstring(statement):
            raise _NotAChain
    raise _NotAChain


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _inputs(value: ast.expr) -> tuple[list[str], int | None]:
    """Return the source texts of a task's inputs, and the rank that all of them have.

    `value` is the expression that get_inputs returns. For example, `[torch.rand(64, 256)]` gives
    (["torch.randn(64, 256)"], 2). torch.rand is replaced by torch.randn, as in composed tasks, because the
    kernel does not depend on the distribution of the inputs. The rank is None if the inputs have different
    ranks, or if one of them is not a call of torch.rand or torch.randn with numbers. Raises _NotAChain if
    `value` is not a list or a tuple.
    """
    if not isinstance(value, ast.List | ast.Tuple):
        raise _NotAChain
    sources: list[str] = []
    ranks: set[int | None] = set()
    for source in map(ast.unparse, value.elts):
        sizes = re.fullmatch(r"torch\.randn?\(([\d, ]+)\)", source)
        sources.append(f"torch.randn({sizes[1]})" if sizes else source)
        ranks.add(len(sizes[1].split(",")) if sizes else None)
    return sources, ranks.pop() if len(ranks) == 1 else None


def _attributes(init: ast.FunctionDef, init_arguments: ast.expr, constants: Names) -> Names:
    """Return the expressions that the constructor assigns to attributes of `self`, in their order.

    In these expressions, the names of `constants` and the constructor's arguments are replaced by their
    values. `init_arguments` is the list of the arguments' values that get_init_inputs returns. Raises
    _NotAChain if the constructor has another statement than such assignments, docstrings and the call of the
    base class's constructor.
    """
    arguments = [argument.arg for argument in init.args.args[1:]]
    values = init_arguments.elts if isinstance(init_arguments, ast.List | ast.Tuple) else []
    names = (
        constants
        | dict(zip(reversed(arguments), reversed(init.args.defaults), strict=False))
        | dict(zip(arguments, values, strict=False))
    )
    attributes: Names = {}
    for statement in init.body:
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Attribute)
            and ast.unparse(statement.targets[0].value) == "self"
        ):
            attributes[statement.targets[0].attr] = _Substitution(names).visit(statement.value)
        elif not _is_docstring(statement) and not ast.unparse(statement).startswith("super("):
            raise _NotAChain
    return attributes


# --- rewriter -----------------------------------------------------------------------------------------------


@dataclass
class _Speller(ast.NodeTransformer):
    """A transformer that rewrites expressions of a user's module into the form that composed tasks have.

    Composed tasks are chains of operators in a fixed layout. For example, `x.relu()` becomes `F.relu(x)`,
    `2 * x` becomes `x * 2.0`, and `x ** 2` becomes `torch.square(x)`. `attributes` are the expressions of the
    attributes of the user's module, by name. `rank` is the rank of its inputs, or None if they have different
    ranks. `renamed` is filled with the name in the composed task of each attribute with parameters, by its
    name in the user's module.
    """

    attributes: Names
    rank: int | None
    renamed: dict[str, str] = field(default_factory=dict)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Rewrite a call of a function, a method or a module of the constructor.

        Calls of norms stay calls of modules, and everything else becomes a call of a torch function. Raises
        _NotAChain if composed tasks have no such module or function.
        """
        self.generic_visit(node)
        namespace, _, name = ast.unparse(node.func).rpartition(".")
        if namespace == "self":
            value = self.attributes.get(name)
            if not isinstance(value, ast.Call):
                raise _NotAChain
            kind = "nn." + ast.unparse(value.func).rpartition(".")[2]
            if kind in NORMS:
                return ast.Call(self._renamed(name, NORMS[kind]), node.args, node.keywords)
            return self._function(
                MODULE_FUNCTIONS.get(kind.removeprefix("nn.").lower(), ""),
                [*node.args, *value.args],
                [*node.keywords, *value.keywords],
            )
        if namespace not in TORCH_NAMESPACES and isinstance(node.func, ast.Attribute):
            return self._function(name, [node.func.value, *node.args], node.keywords)
        return self._function(name, node.args, node.keywords)

    def _function(self, name: str, arguments: list[ast.expr], keywords: list[ast.keyword]) -> ast.expr:
        """Return the call of a torch function with its arguments as composed tasks write them.

        `name` is the function's name without its module. In the call, the dimension is a keyword, which is -1
        for the last one, other constants are positional, and numbers have a decimal point. Raises _NotAChain
        if composed tasks have no function `name`, or if there are no arguments.
        """
        if name not in QUALIFIED_NAMES or not arguments:
            raise _NotAChain
        by_name = {keyword.arg or "": keyword.value for keyword in keywords}
        if name in DIM_FUNCTIONS and len(arguments) == 2:
            by_name["dim"] = arguments.pop()
        if (
            name in DIM_FUNCTIONS
            and self.rank is not None
            and ast.unparse(by_name.get("dim", ast.Constant(0))) == str(self.rank - 1)
        ):
            by_name["dim"] = ast.Constant(-1)
        arguments += [by_name.pop(place) for place in POSITIONAL_CONSTANTS.get(name, ()) if place in by_name]
        return ast.Call(
            ast.parse(QUALIFIED_NAMES[name], mode="eval").body,
            [arguments[0], *map(_with_decimal_point, arguments[1:])],
            [ast.keyword(key, by_name[key]) for key in sorted(by_name)],
        )

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Rewrite a sum, a product or a square as composed tasks write it.

        Numbers, parameters and the second input become the right operand of a sum or product, and a square
        becomes torch.square. Raises _NotAChain for other arithmetic operators.
        """
        self.generic_visit(node)
        if isinstance(node.op, ast.Pow) and ast.unparse(node.right) in ("2", "2.0"):
            return self._function("square", [node.left], [])
        if not isinstance(node.op, ast.Add | ast.Mult):
            raise _NotAChain
        left, right = sorted((node.left, node.right), key=self._is_second_operand)
        if isinstance(right, ast.Attribute):
            right = self._renamed(right.attr, "scale" if isinstance(node.op, ast.Mult) else "shift")
        return ast.BinOp(left, node.op, _with_decimal_point(right))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace `self.name` by its value if the constructor assigns a number to it."""
        value = self.attributes.get(node.attr)
        if (
            isinstance(node.value, ast.Name)
            and node.value.id == "self"
            and value is not None
            and _is_number(value)
        ):
            return copy.deepcopy(value)
        return self.generic_visit(node)

    def _is_second_operand(self, node: ast.expr) -> bool:
        """Return whether composed tasks write the node on the right of `+` or `*`.

        They do so with numbers, parameters and the second input.
        """
        return (
            _is_number(node)
            or isinstance(node, ast.Attribute)
            or (isinstance(node, ast.Name) and node.id == "y")
        )

    def _renamed(self, attribute: str, name: str) -> ast.Attribute:
        """Return the attribute `attribute` of the user's module as `self.name`, its name in composed tasks.

        Raises _NotAChain if the constructor does not assign `attribute`, if it has another name already, or
        if two attributes would have one name.
        """
        if (
            attribute not in self.attributes
            or self.renamed.setdefault(attribute, name) != name
            or list(self.renamed.values()).count(name) > 1
        ):
            raise _NotAChain
        return ast.Attribute(ast.Name("self"), name)

    def init(self) -> list[str]:
        """Return the lines of the composed task's constructor, which create its norms and parameters.

        An example is "self.scale = nn.Parameter(torch.randn(256))". The method is called after `forward` was
        rewritten, because that fills `renamed`. Attributes of the user's module that are numbers or
        activation modules need no line. Raises _NotAChain for any other attribute that `forward` does not
        use. The lines are in the order of the user's constructor, because this order determines that of the
        kernel's arguments.
        """
        lines = []
        for attribute, value in self.attributes.items():
            if attribute not in self.renamed:
                if _is_number(value) or (
                    isinstance(value, ast.Call)
                    and ast.unparse(value.func).rpartition(".")[2].lower() in MODULE_FUNCTIONS
                ):
                    continue
                raise _NotAChain
            text = ast.unparse(value).replace("torch.nn.", "nn.")
            parameter = re.fullmatch(r"nn\.Parameter\(torch\.\w+\((\d+)\)\)", text)
            lines.append(
                f"self.{self.renamed[attribute]} = "
                f"{f'nn.Parameter(torch.randn({parameter[1]}))' if parameter else text}"
            )
        return lines


def _with_decimal_point(node: ast.expr) -> ast.expr:
    """Return a number with a decimal point, or any other expression unchanged."""
    return ast.parse(repr(float(ast.unparse(node))), mode="eval").body if _is_number(node) else node


def _unfold(expression: ast.expr) -> list[str]:
    """Split nested operators into the right-hand sides of `x = …`, in the order of computation.

    For example, `F.relu(x * 2.0)` gives ["x * 2.0", "F.relu(x)"]. Raises _NotAChain if a part of the
    expression is not a known operator.
    """
    if isinstance(expression, ast.Name) and expression.id == "x":
        return []
    text, inner = ast.unparse(expression), _operand(expression)
    while inner is not None:
        # A sum is written in parentheses before a product.
        line = re.sub(r"^\(x\)", "x", text.replace(ast.unparse(inner), "x", 1))
        if any(pattern.fullmatch(line) for pattern in PATTERNS.values()):
            return [*_unfold(inner), line]
        inner = _operand(inner)
    raise _NotAChain


def _operand(node: ast.expr) -> ast.expr | None:
    """Return the first operand of an operator, or None if the node is not an operator.

    The first operand is the first argument of a call, or the left side of an arithmetic expression.
    """
    if isinstance(node, ast.Call) and node.args:
        return node.args[0]
    return node.left if isinstance(node, ast.BinOp) else None
