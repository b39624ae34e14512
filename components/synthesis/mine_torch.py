"""Mining of operator templates from the installed torch.

Every public module of torch.nn and every public function of torch.nn.functional, torch and torch.special is
tried with the arguments of its signature on tensors of rank 2 to 5. A template is the source of one such call
with fields for its inputs and sizes (mined_operators.py). It is kept if it runs on a meta tensor and if its
output on a small real tensor is deterministic, finite, precise in float32, not constant and not equal to the
input.
"""

import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from components.bootstrap.operator_chain import canonical
from components.synthesis.mined_operators import (
    FIT_ERRORS,
    SMALL,
    OperatorTemplate,
    apply_template,
    make_module,
    output_layout,
)
from components.synthesis.operator_ablation import count_distinct, probe, rms
from components.synthesis.torch_rules import (
    ARGUMENTS,
    EXCLUDED,
    FIRST_INPUTS,
    FORCED,
    HAND_WRITTEN,
    SECOND_INPUTS,
)

# Largest number of templates that are tried for one operator.
MAX_VARIANTS = 14
DOES_NOT_FIT = "fits no float32 tensor of rank 2 to 5 and gives one back"


@dataclass(frozen=True)
class Argument:
    """An argument in an operator's signature: its name, whether it is required, whether it is a tensor."""

    name: str
    is_required: bool
    is_tensor: bool


def mine() -> tuple[list[OperatorTemplate], dict[str, str]]:
    """Try torch's public operators, and return the templates that work and why other operators have none.

    A template is the source of one call of an operator. The templates are in the order of the namespaces
    torch.nn, torch.nn.functional, torch and torch.special. The second item has, for each public name without
    a template, the reason why it has none. Mining takes about ten seconds.
    """
    templates: list[OperatorTemplate] = []
    left_out: dict[str, str] = {}
    meanings: dict[tuple[str, ...], str] = {}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for name, thing in _public():
            kept, reason = _working_templates(name, thing)
            if kept and not isinstance(thing, type):
                # Aliases, such as torch.absolute for torch.abs, are recognised by equal dispatched operators.
                other = meanings.setdefault(tuple(map(_trace, kept)), name)
                if canonical(other) != canonical(name):
                    kept, reason = [], f"another name of {other}"
            templates += kept
            if not kept:
                left_out[name] = reason
    return templates, left_out


def _public() -> Iterator[tuple[str, Any]]:
    for name in sorted(dir(nn)):
        thing = getattr(nn, name)
        if isinstance(thing, type) and issubclass(thing, nn.Module):
            yield f"nn.{name}", thing
    for space, prefix in ((F, "F"), (torch, "torch"), (torch.special, "torch.special")):
        # This order puts a name such as torch.asin before its alias torch.arcsin.
        for name in sorted(dir(space), key=lambda name: (name.startswith("arc"), name)):
            thing = getattr(space, name)
            if name.startswith("_") or not callable(thing) or isinstance(thing, type):
                continue
            if space is F or hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, f"special_{name}"):
                yield f"{prefix}.{name}", thing


def _working_templates(name: str, thing: Any) -> tuple[list[OperatorTemplate], str]:
    """Return the templates of the operator `thing` that tasks can use, and the reason if there is none.

    A template is the source of one call. `name` is the operator's public name, such as F.gelu. Each template
    has the numbers of dimensions of input tensors for which it works (`ranks`). The reason is empty if there
    is a template.
    """
    for reason, pattern in EXCLUDED.items():
        if re.fullmatch(pattern, name.rpartition(".")[2]):
            return [], reason
    candidates = list(dict.fromkeys([*HAND_WRITTEN.get(name, ()), *_candidates(name, thing)]))
    if not candidates:
        return [], "no rule says how to call it"
    kept: list[OperatorTemplate] = []
    reasons: list[str] = []
    for init, plain in candidates[:MAX_VARIANTS]:
        # A call that returns several tensors, such as (values, indices), fits only with an index.
        for call in (plain, f"{plain}[0]"):
            defects = {rank: _find_defect(OperatorTemplate(name, call, (rank,), init)) for rank in SMALL}
            reasons += filter(None, defects.values())
            if ranks := tuple(rank for rank, defect in defects.items() if not defect):
                kept.append(OperatorTemplate(name, call, ranks, init))
            if set(defects.values()) != {DOES_NOT_FIT}:
                break
    # A defect on a real tensor is a better explanation than a template that does not fit a meta tensor.
    return kept, "" if kept else min(reasons, key=lambda reason: reason == DOES_NOT_FIT)


def _candidates(name: str, thing: Any) -> Iterator[tuple[str, str]]:
    """Yield the expressions (init, call) of each way to call an operator that torch_rules.py permits.

    `thing` is the module class or the function with the public name `name`. `init` creates the module and is
    empty for a function; `call` has fields such as `{x}` for the input.
    """
    if isinstance(thing, type):
        for arguments in _fill_arguments(_signature(thing)):
            takes = [a for a in _signature(vars(nn)[thing.__name__].forward)[1:] if a.is_required]
            call = "{self}({x}, {y})" if len(takes) == 2 else "{self}({x})"
            yield f"{name}({', '.join(arguments)})", call
        return
    for signature in _overloads(name, thing):
        tensors = [a for a in signature if a.is_tensor and a.is_required]
        if (
            not tensors
            or len(tensors) > 2
            or tensors[0] is not signature[0]
            or (len(tensors) == 2 and tensors[1].name not in SECOND_INPUTS)
        ):
            continue
        inputs = ["{x}", "{y}"][: len(tensors)]
        for arguments in _fill_arguments([a for a in signature if not a.is_tensor]):
            yield "", f"{name}({', '.join([*inputs, *arguments])})"


def _fill_arguments(arguments: list[Argument]) -> Iterator[list[str]]:
    """Yield lists of keyword arguments for a call, as texts such as "dim=-1".

    The first list has only the required arguments and those in FORCED. Each further list has one argument
    more, or one with another value from ARGUMENTS. Nothing is yielded if ARGUMENTS lacks a required argument.
    """
    if any(a.is_required and a.name not in ARGUMENTS for a in arguments):
        return
    base = {a.name: ARGUMENTS[a.name][0] for a in arguments if a.is_required}
    base |= {a.name: FORCED[a.name] for a in arguments if a.name in FORCED}
    yield [f"{key}={value}" for key, value in base.items()]
    for a in arguments:
        for value in ARGUMENTS.get(a.name, ())[1 if a.is_required else 0 :]:
            yield [f"{key}={value}" for key, value in (base | {a.name: value}).items()]


def _signature(function: Any) -> list[Argument]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        Argument(
            name=p.name,
            is_required=p.default is p.empty,
            is_tensor=p.annotation in (Tensor, "Tensor", "torch.Tensor")
            or (p.default is p.empty and p.name in FIRST_INPUTS | SECOND_INPUTS),
        )
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def _overloads(name: str, thing: Any) -> Iterator[list[Argument]]:
    """Yield the arguments of a function's Python signature or, if it has none, of each of its aten overloads.

    `name` is the function's public name, such as torch.cumsum. Overloads with an `out` argument or with named
    dimensions are left out.
    """
    if signature := _signature(thing):
        yield signature
        return
    short = name.rpartition(".")[2]
    prefix = "special_" if name.startswith("torch.special.") else ""
    packet = getattr(torch.ops.aten, prefix + short, None) or getattr(torch.ops.aten, short, None)
    for overload in packet.overloads() if packet is not None else ():
        schema = getattr(packet, overload)._schema
        if "out" not in overload and "Dimname" not in str(schema):
            yield [
                Argument(a.name, not a.has_default_value(), str(a.type) == "Tensor") for a in schema.arguments
            ]


# --- checks of a template -----------------------------------------------------------------------------------


class _DispatchRecorder(TorchDispatchMode):
    """A context manager that records the operators that torch dispatches in its block.

    `calls` has each operator with those of its arguments that are no tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        constants = [a for a in (*args, *(kwargs or {}).items()) if not isinstance(a, Tensor)]
        self.calls.append((func, constants))
        return func(*args, **(kwargs or {}))


def _trace(template: OperatorTemplate) -> str:
    x, y = probe(SMALL[template.ranks[0]])
    with _DispatchRecorder() as recorder:
        apply_template(template, x, y)
    return f"{recorder.calls}"


def _find_defect(template: OperatorTemplate) -> str:
    """Return the reason why a template cannot be used in tasks, or an empty string.

    A template is the source of one call of an operator. It is tried on meta tensors and on small real inputs
    with the first of the numbers of dimensions in `template.ranks`.
    """
    shape = SMALL[template.ranks[0]]
    if output_layout(template, shape, torch.empty(shape, device="meta").stride()) is None:
        return DOES_NOT_FIT
    x, y = probe(shape)
    try:
        module = make_module(template, x)
        with warnings.catch_warnings(record=True) as messages, _DispatchRecorder() as recorder:
            warnings.simplefilter("always")
            out = apply_template(template, x.clone(), y.clone(), module)
        if any("deprecated" in str(warning.message) for warning in messages):
            return "deprecated in this form"
        if any(torch.Tag.nondeterministic_seeded in function.tags for function, _ in recorder.calls):
            return "draws random numbers"
        wide = apply_template(template, x.double(), y.double())
    except FIT_ERRORS as error:
        message = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
        return f"fails on a real tensor ({message})"
    if out.dtype != torch.float32:
        return "gives no float32 tensor back"
    scale = out.square().mean().sqrt().item()
    defects = {
        "not finite on normal inputs": not torch.isfinite(out).all(),
        "constant on normal inputs": out.std().item() <= 1e-3 * scale or not scale,
        "takes a few values only; rounding decides which": count_distinct(out / scale)
        < min(32, out.numel() // 2),
        "float32 does not carry it": rms(out.double() - wide) > 1e-5 * scale,
        "gives its input back when not training": out.shape == x.shape and torch.equal(out, x),
        "does not depend on its second input": template.second
        and torch.equal(apply_template(template, x, y.flip(0)), out),
    }
    return next((reason for reason, is_found in defects.items() if is_found), "")
