"""Mining the installed torch: every public module of torch.nn and every public function of torch.nn.functional, torch
and torch.special is tried with arguments that its signature asks for, on tensors of rank 2 to 5.

A form is kept when it fits on a meta tensor and, on a small real one, is deterministic, finite, carried by float32, and
neither constant nor its own input. Every name that no form of is kept goes to the list of those left out, with the reason.
"""

from __future__ import annotations

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

from components.synthesis.core_operators import canonical
from components.synthesis.mined_operators import (
    FAULTS,
    SMALL,
    OperatorTemplate,
    Skipped,
    apply,
    make_module,
    output_layout,
)

VARIANTS = 14
"""Forms that are tried of one operator, at most."""

ARGUMENTS: dict[str, tuple[str, ...]] = {
    # What an argument of this name is given. The first value stands where the argument is required; each other one, and
    # each one of an optional argument, makes a form of its own.
    "num_features": ("{channels}",),
    "num_channels": ("{channels}",),
    "num_groups": ("4", "2", "8"),
    "groups": ("4", "2"),
    "in_channels": ("{channels}",),
    "out_channels": ("{channels}", "{twice_channels}", "{half_channels}"),
    "in_features": ("{last}",),
    "out_features": ("{last}", "{twice_last}", "{half_last}"),
    "input_size": ("{last}",),
    "hidden_size": ("{last}", "{half_last}"),
    "embed_dim": ("{last}",),
    "num_heads": ("4", "8"),
    "d_model": ("{last}",),
    "nhead": ("4", "8"),
    "dim_feedforward": ("{twice_last}",),
    "batch_first": ("True",),
    "kernel_size": ("3", "2", "5"),
    "output_size": ("4", "2", "7"),
    "normalized_shape": ("({last},)",),
    "num_parameters": ("{channels}",),
    "size": ("5", "3"),
    "norm_type": ("2", "1"),
    "upscale_factor": ("2",),
    "downscale_factor": ("2",),
    "scale_factor": ("2", "3"),
    "mode": ('"bilinear"', '"bicubic"', '"trilinear"', '"linear"'),
    "padding": ("1", "2", "(1, 2)"),
    "pad": ("(1, 2)", "(2, 1, 0, 3)"),
    "stride": ("2",),
    "dilation": ("2",),
    "bias": ("False",),
    "affine": ("True",),
    "elementwise_affine": ("False",),
    "dim": ("-1", "1", "0", "-2"),
    "dims": ("(-1, -2)", "(1,)", "(0, 1)"),
    "dim0": ("1",),
    "dim1": ("-1",),
    "axis0": ("1",),
    "axis1": ("-1",),
    "source": ("1",),
    "destination": ("-1",),
    "keepdim": ("True",),
    "descending": ("True",),
    "unbiased": ("False",),
    "correction": ("0",),
    "negative_slope": ("0.1", "0.2", "0.3"),
    "alpha": ("0.5", "1.5"),
    "beta": ("2.0", "0.5"),
    "lambd": ("0.25", "0.4"),
    "threshold": ("0.1", "0.5"),
    "value": ("0.5", "1.5"),
    "min": ("-0.5", "0.25"),
    "max": ("0.75", "1.5"),
    "min_val": ("-0.5", "-2.0"),
    "max_val": ("0.75", "2.0"),
    "exponent": ("2.0", "3.0"),
    "weight": ("0.3", "0.7"),
    "delta": ("0.5",),
    "margin": ("0.5",),
    "eps": ("1e-4",),
    "p": ("1", "3"),
    "approximate": ('"tanh"',),
    "k": ("4", "2", "1"),
    "n": ("1", "2"),
    "shifts": ("3", "1"),
    "diagonal": ("1", "-1"),
    "offset": ("1",),
    "repeats": ("2", "3"),
    "reps": ("(1, 2)", "(2, 1)"),
    "q": ("0.5", "0.9"),
    "ceil_mode": ("True",),
    "count_include_pad": ("False",),
    "log_target": ("True",),
    "start_dim": ("1", "2"),
    "end_dim": ("-2",),
    "decimals": ("1",),
    "maxnorm": ("1.0",),
    "align_corners": ("True",),
}
FORCED = {"reduction": '"none"', "batch_first": "True", "dropout": "0.0"}
"""Arguments that are always given: a mean over everything leaves one number, which a constant would answer."""
SECOND = frozenset("other target y input2 x2 end tensor2 mat2 tensor1 batch2 vec2".split())
FIRST = frozenset("self input x x1 input1 tensor a".split())

WRITTEN: dict[str, tuple[tuple[str, str], ...]] = {
    # What no signature tells: (init, call).
    "torch.matmul": (
        ("", "torch.matmul({x}, {y}.transpose(-1, -2))"),
        ("", "torch.matmul({x}.transpose(-1, -2), {y})"),
    ),
    "torch.mm": (("", "torch.mm({x}, {y}.t())"), ("", "torch.mm({x}.t(), {y})")),
    "torch.bmm": (("", "torch.bmm({x}, {y}.transpose(1, 2))"), ("", "torch.bmm({x}.transpose(1, 2), {y})")),
    "torch.einsum": (
        ("", 'torch.einsum("...ij,...kj->...ik", {x}, {y})'),
        ("", 'torch.einsum("...ij,...ij->...i", {x}, {y})'),
    ),
    "torch.where": (("", "torch.where({x} > 0.0, {x}, {y})"), ("", "torch.where({x} > {y}, {x}, 0.5 * {x})")),
    "torch.masked_fill": (
        ("", "torch.masked_fill({x}, {x} > 1.0, 0.5)"),
        ("", "torch.masked_fill({x}, {y} > 0.5, -1.0)"),
    ),
    "torch.addcmul": (("", "torch.addcmul({x}, {x}, {y}, value=0.5)"),),
    "torch.cat": (("", "torch.cat([{x}, {y}], dim=1)"), ("", "torch.cat([{x}, {y}], dim=-1)")),
    "torch.stack": (("", "torch.stack([{x}, {y}], dim=1)"), ("", "torch.stack([{x}, {y}], dim=2)")),
    "torch.gather": (("", "torch.gather({x}, -1, torch.argsort({y}, dim=-1))"),),
    "torch.take_along_dim": (("", "torch.take_along_dim({x}, torch.argsort({y}, dim=1), dim=1)"),),
    "torch.cdist": (("", "torch.cdist({x}, {y})"), ("", "torch.cdist({x}, {y}, p=1.0)")),
    "F.linear": (
        ("nn.Parameter(torch.randn({last}, {last}) * {last} ** -0.5)", "F.linear({x}, {self})"),
        ("nn.Parameter(torch.randn({half_last}, {last}) * {last} ** -0.5)", "F.linear({x}, {self})"),
    ),
    "F.conv1d": (
        (
            "nn.Parameter(torch.randn({channels}, {channels}, 3) * (3 * {channels}) ** -0.5)",
            "F.conv1d({x}, {self}, padding=1)",
        ),
    ),
    "F.conv2d": (
        (
            "nn.Parameter(torch.randn({channels}, {channels}, 3, 3) * (9 * {channels}) ** -0.5)",
            "F.conv2d({x}, {self}, padding=1)",
        ),
        (
            "nn.Parameter(torch.randn({channels}, 1, 3, 3) / 3.0)",
            "F.conv2d({x}, {self}, padding=1, groups={channels})",
        ),
    ),
    "F.prelu": (("nn.Parameter(torch.rand({channels}) * 0.5)", "F.prelu({x}, {self})"),),
    "F.scaled_dot_product_attention": (
        ("", "F.scaled_dot_product_attention({x}, {y}, {y})"),
        ("", "F.scaled_dot_product_attention({x}, {x}, {y}, is_causal=True)"),
    ),
    "F.interpolate": (
        ("", 'F.interpolate({x}, scale_factor=2.0, mode="nearest")'),
        ("", 'F.interpolate({x}, scale_factor=2.0, mode="bilinear", align_corners=False)'),
        ("", 'F.interpolate({x}, scale_factor=0.5, mode="area")'),
    ),
    "nn.MultiheadAttention": (
        (
            "nn.MultiheadAttention({last}, 4, batch_first=True)",
            "{self}({x}, {x}, {x}, need_weights=False)[0]",
        ),
        (
            "nn.MultiheadAttention({last}, 8, batch_first=True)",
            "{self}({x}, {y}, {y}, need_weights=False)[0]",
        ),
    ),
    "nn.Conv2d": (
        ("nn.Conv2d({channels}, {channels}, 3, padding=1, groups={channels})", "{self}({x})"),
        ("nn.Conv2d({channels}, {twice_channels}, 1)", "{self}({x})"),
        ("nn.Conv2d({channels}, {channels}, 3, padding=1)", "{self}({x})"),
    ),
    "nn.Conv1d": (("nn.Conv1d({channels}, {channels}, 7, padding=3, groups={channels})", "{self}({x})"),),
    "nn.Bilinear": (("nn.Bilinear({last}, {last}, {half_last})", "{self}({x}, {y})"),),
}
NOT_MINED: dict[str, str] = {
    # Reason -> pattern of the names that it keeps out.
    "works in place; its form without the underscore stands for it": r"\w+_",
    "a backend's own form of another operator": (
        r"(mkldnn|cudnn|miopen|fbgemm|quantized|native|sparse|fused|sym)_\w+|\w+_(copy|scatter)|convolution|batch_norm_\w+"
    ),
    "quantised tensors; tasks are float32": r"(q_per|q_|quantize_|fake_quantize|choose_q|int_repr|dequantize)\w*",
    "takes its sizes from the first input; its eager form stands for it": r"Lazy\w+",
    "a container or base class, no operator": (
        r"Module|ModuleList|ModuleDict|ParameterList|ParameterDict|Sequential|Container|DataParallel|RNNBase|RNNCellBase|SyncBatchNorm"
    ),
    "a stack of many operators, or a loop over time steps; the cells are mined": r"LSTM|GRU|RNN|Transformer\w*",
    "no operator": (
        r"(handle|has)_torch_function\w*|assert_int_or_pair|boolean_dispatch|Optional|Tensor|torch|save|\w*seed|from_file|wait|range"
    ),
    "a decomposition, ill-conditioned on random matrices": (
        r"(cholesky|lu|qr|svd|logdet|slogdet|inverse|pinverse|orgqr|ormqr|geqrf|triangular_solve|nuclear_norm)\w*|det"
    ),
    "jumps: rounding decides on which side": r"floor_divide|fmod|remainder|frac|round|nextafter|frexp|ceil|floor|trunc|fix|sgn|sign|copysign|mode",
    "gives its input back, or a view of it": r"as_tensor|clone|detach|positive|real|conj\w*|resolve_\w+|atleast_\dd|adjoint",
    "exposes memory and not values": r"as_strided\w*|resize_as\w*|empty_like|set_\w+|hash_tensor|unsafe_\w+",
}


@dataclass(frozen=True)
class Argument:
    name: str
    required: bool
    tensor: bool


def mine() -> tuple[list[OperatorTemplate], list[Skipped]]:
    """Forms in the order of names, and every public name that none was kept of. About ten seconds of one core."""
    forms: list[OperatorTemplate] = []
    left_out: list[Skipped] = []
    meanings: dict[tuple[str, ...], str] = {}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for name, thing in _public():
            found, reason = _forms(name, thing)
            if found and not isinstance(thing, type):
                # torch.absolute is torch.abs: the same calls come to the same operators underneath.
                meaning = tuple(_trace(form) for form in found)
                other = meanings.setdefault(meaning, name)
                if other != name and canonical(other) != canonical(name):
                    found, reason = [], f"another name of {other}"
            forms += found
            if not found:
                left_out.append(Skipped(name, reason))
    return forms, left_out


def _public() -> Iterator[tuple[str, Any]]:
    for name in sorted(dir(nn)):
        thing = getattr(nn, name)
        if isinstance(thing, type) and issubclass(thing, nn.Module):
            yield f"nn.{name}", thing
    for space, prefix in ((F, "F"), (torch, "torch"), (torch.special, "torch.special")):
        # torch.asin before torch.arcsin: the name of the operator underneath stands for its other names.
        for name in sorted(dir(space), key=lambda name: (name.startswith("arc"), name)):
            thing = getattr(space, name)
            if name.startswith("_") or not callable(thing) or isinstance(thing, type):
                continue
            if space is F or hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, f"special_{name}"):
                yield f"{prefix}.{name}", thing


def _forms(name: str, thing: Any) -> tuple[list[OperatorTemplate], str]:
    """The forms that work, each with its ranks, or the reason why there is none."""
    short = name.rpartition(".")[2]
    for reason, pattern in NOT_MINED.items():
        if re.fullmatch(pattern, short):
            return [], reason
    templates = list(dict.fromkeys([*WRITTEN.get(name, ()), *_templates(name, thing)]))
    if not templates:
        return [], _unruled(name, thing)
    kept, reasons = [], []
    for init, plain in templates[:VARIANTS]:
        call = plain + "[0]" if _gives_several(OperatorTemplate(name, plain, tuple(SMALL), init)) else plain
        ranks = []
        for rank in SMALL:
            reason = _find_defect(OperatorTemplate(name, call, (rank,), init))
            if reason:
                reasons.append(reason)
            else:
                ranks.append(rank)
        if ranks:
            kept.append(OperatorTemplate(name, call, tuple(ranks), init))
    # The reason that came nearest to working says most: a misfit on a meta tensor is the least.
    told = [reason for reason in reasons if not reason.startswith("fits")] or reasons
    return kept, "" if kept else told[0]


def _gives_several(form: OperatorTemplate) -> bool:
    """Whether it returns a tuple such as (values, indices)."""
    for shape in SMALL.values():
        x = torch.empty(shape, device="meta")
        try:
            return isinstance(apply(form, x, x), tuple | list)
        except FAULTS:
            continue
    return False


def _templates(name: str, thing: Any) -> Iterator[tuple[str, str]]:
    if isinstance(thing, type):
        for arguments in _filled(_signature(thing)):
            takes = [a for a in _signature(vars(nn)[thing.__name__].forward)[1:] if a.required]
            call = "{self}({x}, {y})" if len(takes) == 2 else "{self}({x})"
            yield f"{name}({', '.join(arguments)})", call
        return
    for signature in _overloads(name, thing):
        tensors = [a for a in signature if a.tensor and a.required]
        if (
            not tensors
            or len(tensors) > 2
            or tensors[0] is not signature[0]
            or (len(tensors) == 2 and tensors[1].name not in SECOND)
        ):
            continue
        inputs = ["{x}", "{y}"][: len(tensors)]
        for arguments in _filled([a for a in signature if not a.tensor]):
            yield "", f"{name}({', '.join([*inputs, *arguments])})"


def _filled(arguments: list[Argument]) -> Iterator[list[str]]:
    """The required arguments, and then one optional or other value at a time. Nothing where an argument has no rule."""
    if any(a.required and a.name not in ARGUMENTS for a in arguments):
        return
    base = {a.name: ARGUMENTS[a.name][0] for a in arguments if a.required}
    base |= {a.name: FORCED[a.name] for a in arguments if a.name in FORCED}
    yield [f"{key}={value}" for key, value in base.items()]
    for a in arguments:
        for value in ARGUMENTS.get(a.name, ())[1 if a.required else 0 :]:
            yield [f"{key}={value}" for key, value in (base | {a.name: value}).items()]


def _unruled(name: str, thing: Any) -> str:
    signatures = [_signature(thing)] if isinstance(thing, type) else list(_overloads(name, thing))
    if not signatures:
        return "has no signature that can be read"
    if not isinstance(thing, type) and not any(signature and signature[0].tensor for signature in signatures):
        return "takes no tensor first"
    unknown = [
        a.name for a in signatures[0] if a.required and a.name not in ARGUMENTS and a.name not in FIRST
    ]
    return (
        f"needs {', '.join(unknown)}, and no rule says what to give"
        if unknown
        else "takes more tensors than a chain has"
    )


def _signature(function: Any) -> list[Argument]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [Argument(p.name, p.default is p.empty, _is_tensor(p)) for p in named]


def _is_tensor(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in (Tensor, "Tensor", "torch.Tensor") or (
        parameter.default is parameter.empty and parameter.name in FIRST | SECOND
    )


def _overloads(name: str, thing: Any) -> Iterator[list[Argument]]:
    """Signatures: Python's own, or those of the aten operator of this name that are not for results given in."""
    own = _signature(thing)
    if own:
        yield own
        return
    short = name.rpartition(".")[2]
    packet = getattr(torch.ops.aten, f"special_{short}" if name.startswith("torch.special.") else short, None)
    if packet is None:
        packet = getattr(torch.ops.aten, short, None)
    for overload in packet.overloads() if packet is not None else ():
        arguments = getattr(packet, overload)._schema.arguments
        if "out" in overload or "Dimname" in str(getattr(packet, overload)._schema):
            continue
        yield [Argument(a.name, not a.has_default_value(), str(a.type) == "Tensor") for a in arguments]


# --- what is asked of a form -------------------------------------------------------------------------------------------


class _Watch(TorchDispatchMode):
    """Notes the operators underneath, and whether one of them draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
        given = [a for a in (*args, *(kwargs or {}).items()) if not isinstance(a, Tensor)]
        self.calls.append(f"{func}{given}")
        return func(*args, **(kwargs or {}))


def probe(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Two fixed normal tensors."""
    generator = torch.Generator().manual_seed(20260227)
    x, y = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return x, y


def _trace(form: OperatorTemplate) -> str:
    x, y = probe(SMALL[form.ranks[0]])
    with _Watch() as watch:
        apply(form, x, y)
    return f"{watch.calls}"


def _find_defect(form: OperatorTemplate) -> str:
    """Why this form on tensors of its one rank makes no task; empty when nothing speaks against it."""
    shape = SMALL[form.ranks[0]]
    if output_layout(form, shape, torch.empty(shape, device="meta").stride()) is None:
        return "fits no float32 tensor of rank 2 to 5 and gives one back"
    x, y = probe(shape)
    try:
        holder = make_module(form, x)
        with warnings.catch_warnings(record=True) as told, _Watch() as watch:
            warnings.simplefilter("always")
            out = apply(form, x.clone(), y.clone(), holder)
        if any("deprecated" in str(warning.message) for warning in told):
            return "deprecated in this form"
        if watch.random:
            return "draws random numbers"
        wide = apply(form, x.double(), y.double())
    except FAULTS as error:
        return f"fails on a real tensor ({str(error).splitlines()[0][:80] if str(error) else type(error).__name__})"
    if out.dtype != torch.float32:
        return "gives no float32 tensor back"
    if not torch.isfinite(out).all():
        return "not finite on normal inputs"
    scale = out.square().mean().sqrt().item()
    if out.std().item() <= 1e-3 * scale or not scale:
        return "constant on normal inputs"
    if torch.unique((out / scale * 1000).round()).numel() < min(32, out.numel() // 2):
        return "takes a few values only; rounding decides which"
    if (out.double() - wide).square().mean().sqrt().item() > 1e-5 * scale:
        return "float32 does not carry it"
    if out.shape == x.shape and torch.equal(out, x):
        return "gives its input back when not training"
    if form.second and torch.equal(apply(form, x, y.flip(0)), out):
        return "does not depend on its second input"
    return ""
