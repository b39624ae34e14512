"""Templates of the mined operators and modules, and their application to real and meta tensors.

Mined operators and modules are those of the installed torch and transformers that were tried and found usable
in tasks, which are modules that a policy has to make faster (mine_torch.py, mine_transformers.py). A template
is the source of one call of an operator. In it, `{x}` stands for the input, `{y}` for a second input of the
same shape, and `{self}` for the module or parameter that `init` creates. Other fields such as `{channels}`
and `{last}` stand for sizes of the input (see `fill_template`), so that one template fits both the small
tensors on which it is tried and the large tensors of a task.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.bootstrap.operator_chain import canonical

# Shapes by rank on which templates are tried: rows, sequences or signals, images, volumes.
SMALL: dict[int, tuple[int, ...]] = {2: (8, 64), 3: (2, 16, 64), 4: (2, 16, 12, 12), 5: (2, 8, 8, 8, 8)}
# Exceptions that torch raises if the arguments of an operator do not fit.
FIT_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    AssertionError,
    NotImplementedError,
    AttributeError,
    ZeroDivisionError,
)
NAMESPACE: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}


@dataclass(frozen=True)
class OperatorTemplate:
    """A template of the Python source that calls one operator of torch.

    `name` is the public name in the source, such as nn.Conv2d or F.gelu. `call` is an expression with fields
    such as `{x}`, which `fill_template` replaces. `ranks` are the numbers of dimensions of the inputs to
    which the template can be applied. `init` is the expression that creates the module or parameter in
    `__init__`, or "" if none is needed.
    """

    name: str
    call: str
    ranks: tuple[int, ...]
    init: str = ""

    @property
    def operator(self) -> str:
        """Return the operator's name in the form that is equal for all its spellings.

        It is leakyrelu for nn.LeakyReLU and F.leaky_relu.
        """
        return canonical(self.name)

    @property
    def second(self) -> bool:
        return "{y}" in self.call


@dataclass(frozen=True)
class TransformersModule:
    """A self-contained module of transformers, from which `write_module_source` makes the source of a task.

    `name` is the name of the class or function in the library, and `family` that of its model folder. `code`
    is the source of it and of all definitions that it uses. `init` and `call` are the expressions that create
    the module and call it. `inputs` are the expressions for the inputs, with fields for sizes such as
    `{batch}`, `{length}` and `{hidden}`. `config` has the default values of the configuration fields that the
    source reads, by the fields' names.
    """

    name: str
    family: str
    code: str
    config: dict[str, Any]
    init: str
    call: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class OperatorTable:
    """The operators and modules of one version of torch and transformers of which tasks can be made.

    `torch` and `transformers` are the versions of the libraries. `templates` have the source of one call of
    an operator each, and `modules` are self-contained modules of transformers. `left_out` maps each public
    name that was considered and cannot be used to the reason.
    """

    torch: str
    transformers: str
    templates: tuple[OperatorTemplate, ...]
    modules: tuple[TransformersModule, ...]
    left_out: dict[str, str]


def fill_template(
    template: OperatorTemplate, shape: Sequence[int], attribute: str = "self.op"
) -> tuple[str, str]:
    """Return a template's `init` and `call` with all fields, such as `{last}`, filled in for an input shape.

    A template is the source of one call of an operator. `init` creates the module or parameter that the
    operator needs, and is "" if it needs none; `call` is the call itself. `shape` has at least two
    dimensions. `attribute` is the expression for what `init` creates. The input is called `x` and the second
    input `y`.
    """
    values = {
        "channels": shape[1],
        "last": shape[-1],
        "before_last": shape[-2],
        "twice_channels": 2 * shape[1],
        "half_channels": max(shape[1] // 2, 1),
        "twice_last": 2 * shape[-1],
        "half_last": max(shape[-1] // 2, 1),
    }
    return template.init.format(**values), template.call.format(x="x", y="y", self=attribute, **values)


@functools.lru_cache(maxsize=65536)
def function_of(call: str) -> Any:
    """Return a function of (x, y, self) that evaluates the expression `call`, such as "F.gelu(x)".

    The names `torch`, `nn` and `F` are known in the expression. The text is executed as Python code, so it
    must come from a template of this project.
    """
    return eval(f"lambda x, y, self: {call}", dict(NAMESPACE))


def make_module(template: OperatorTemplate, x: Tensor) -> SimpleNamespace:
    """Return a stand-in for a task's module, with which a template is tried.

    Its attribute `op` is what the template's `init` creates for an input with the shape, device and dtype of
    `x`, or None if the template needs nothing. On the CPU, parameters have the same values in every call.
    """
    init, _ = fill_template(template, x.shape)
    if not init:
        return SimpleNamespace(op=None)
    with torch.device(x.device):
        made = eval(init, dict(NAMESPACE))
    if isinstance(made, nn.Module):
        made = made.eval().to(x.dtype)
        parameters = list(made.named_parameters())
    else:
        made = nn.Parameter(made.data.to(x.dtype))
        parameters = [("weight", made)]
    if x.device.type == "cpu":
        _fill(parameters)
    return SimpleNamespace(op=made)


@torch.no_grad()
def _fill(parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Set the named parameters to random values that are the same in every call.

    The values are drawn from a separate generator, because other threads use the global one.
    """
    generator = torch.Generator().manual_seed(20260227)
    for name, parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            values = noise * (parameter.shape[0] / parameter.numel()) ** 0.5
        elif "bias" in name:
            values = 0.1 * noise
        else:
            # The scale of a norm stays near 1, and the slope of a PReLU stays near its default.
            constant = parameter.numel() > 0 and bool((parameter == parameter[0]).all())
            values = (parameter[0].item() if constant else 0.25) * (1 + 0.1 * noise)
        parameter.copy_(values)


def apply_template(
    template: OperatorTemplate, x: Tensor, y: Tensor | None, module: SimpleNamespace | None = None
) -> Tensor:
    """Return the output of a template (the source of one call of an operator) for the inputs `x` and `y`.

    The inputs may be meta tensors. `y` may be None if the template has no second input. `module` has the
    module or parameter that the operator needs (`make_module`), and is made if it is None. Raises one of
    FIT_ERRORS if the operator cannot be applied to the inputs.
    """
    output: Tensor = function_of(fill_template(template, x.shape)[1])(
        x, y, module or make_module(template, x)
    )
    return output


@functools.lru_cache(maxsize=65536)
def output_layout(
    template: OperatorTemplate, shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shape and strides of a template's output for a float32 input with this shape and strides.

    A template is the source of one call of an operator; it is applied to meta tensors here. The strides are
    in elements. The result is None if the template does not fit, which means that it raises an exception, or
    returns anything but a float32 tensor of rank 2 to 5 that is not empty.
    """
    x = torch.empty_strided(shape, stride, device="meta")
    y = torch.empty(shape, device="meta") if template.second else None
    try:
        with torch.no_grad():
            out = apply_template(template, x, y)
    except FIT_ERRORS:
        return None
    if (
        not isinstance(out, Tensor)
        or out.dtype != torch.float32
        or not 2 <= out.dim() <= 5
        or not out.numel()
        or out.is_nested
    ):
        return None
    return tuple(out.shape), tuple(out.stride())


# Configuration values that depend on the hidden size, as multiples of the hidden size.
SCALED: dict[str, float] = {
    **dict.fromkeys(
        "hidden_size d_model n_embd embed_dim dim hidden_dim embedding_size out_hidden_size".split(), 1.0
    ),
    **dict.fromkeys(
        (
            "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff ffn_hidden_size "
            "shared_expert_intermediate_size"
        ).split(),
        2.0,
    ),
    **dict.fromkeys("moe_intermediate_size mlp_intermediate_size".split(), 0.5),
    **dict.fromkeys(
        (
            "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
            "decoder_attention_heads attention_heads"
        ).split(),
        1 / 64,
    ),
    **dict.fromkeys("num_key_value_heads num_kv_heads".split(), 1 / 128),
}
FIXED: dict[str, Any] = {
    "head_dim": 64,
    "d_kv": 64,
    "n_inner": None,
    "max_position_embeddings": 2048,
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), 8),
    **dict.fromkeys("num_experts_per_tok moe_top_k top_k num_experts_per_token".split(), 2),
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 1000,
    "_attn_implementation": "eager",
    "attn_implementation": "eager",
    "use_cache": False,
    "output_attentions": False,
    "chunk_size_feed_forward": 0,
}
SOURCE = """{code}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
{config}        self.block = {init}

    def forward(self, {arguments}):
        return {call}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""


def write_module_source(module: TransformersModule, batch: int, length: int, hidden: int) -> str:
    """Return the Python source of a task whose `Model` calls the module on inputs of these sizes.

    The main input has the shape [batch, length, hidden]. If it is an image, its shape is [batch, hidden,
    side, side], where `side` is the root of `length` rounded down. The fields of the module's configuration
    that SCALED names become multiples of `hidden`, and those that FIXED names get their fixed values.
    """
    values = {
        "batch": batch,
        "length": length,
        "hidden": hidden,
        "twice": 2 * hidden,
        "heads": max(1, hidden // 64),
        "side": math.isqrt(length),
    }
    scaled = (
        module.config
        | {key: FIXED[key] for key in module.config if key in FIXED}
        | {key: max(1, int(SCALED[key] * hidden)) for key in module.config if key in SCALED}
    )
    settings = ", ".join(f"{key}={value!r}" for key, value in scaled.items())
    config = f"        config = SimpleNamespace({settings})\n" if "config" in module.init else ""
    return SOURCE.format(
        code=module.code,
        config=config,
        init=module.init.format(**values),
        arguments=", ".join("xyzw"[: len(module.inputs)]),
        call=module.call,
        inputs=", ".join(text.format(**values) for text in module.inputs),
    )
