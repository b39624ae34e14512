"""Block torch's operators, record their results, compute them in float64, and count their operations.

Blocking. A candidate is an implementation of a PyTorch module, to be judged. If the parameter sandbox.rules
is `kernel-only`, it must use its own kernels instead of torch's compute operators (`block_operators`). The
functions that torch's dispatcher calls for these operators are replaced before any of the candidate's code
runs, for all threads and until the process ends. So the candidate gets the original functions neither by a
look-up in the dispatcher nor in a CUDA graph that it captures. A dispatch mode could block the same calls,
but a candidate can see whether a mode is set, and a mode that is always set costs time in every call.

Recording. In a candidate's constructor, operators that allocate, view, copy, fill or draw random numbers run
as usual. None of them does arithmetic with the values of tensors, so a candidate cannot use them to compute
an output. A constructor may need another operator, as for the product in `torch.randn(8, 8) * 0.02`. Such a
constructor is run beforehand in a second process, where torch computes and nothing is measured. That process
records the results of such operators, and in the measured process the constructor gets the recorded results
(`ConstructorMode`).

Float64. Inside the context `computing_in_float64`, the arguments of every torch function are converted at the
call: float32 tensors and dtypes are replaced by float64, and for a task in half precision float16 and
bfloat16 too. So code that names float32 computes in float64 without a change of its source. Code for which
this would give wrong results is rejected with RuntimeError (`Float64Mode`).

Counting. `OperationCounter` adds up the floating-point operations of a call.

This file runs only inside the sandbox; the judge never imports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

# Operators that stay allowed: allocations, views and copies. The last four are allowed because zeros and
# clone call them, and because delivery.py delivers results with them.
ALLOWED_OPERATORS = frozenset(
    """
    empty empty_strided empty_like new_empty new_empty_strided zeros zeros_like new_zeros view _unsafe_view
    reshape alias detach as_strided slice select unsqueeze squeeze expand permute transpose t contiguous
    clone split unbind narrow lift_fresh _reshape_alias is_pinned copy_ fill_ zero_ _foreach_copy_""".split()
)
# Operators that compute in a kernel of their own although they are registered as compositions of others.
COMPOSITES = re.compile(
    r"max_pool1d|_saturate_weight_to_fp16|fbgemm_\w+|_?choose_qparams\w+|_rowwise_prune|_sobol_engine_\w+"
    r"|quantized_(?:lstm|gru|rnn_relu|rnn_tanh)_cell"
)
# Dispatch keys of tensors with other layouts, which have kernels of their own, by device.
LAYOUT_KEYS = {
    "cpu": ("SparseCPU", "SparseCsrCPU", "QuantizedCPU", "MkldnnCPU", "NestedTensorCPU"),
    "cuda": ("SparseCUDA", "SparseCsrCUDA", "QuantizedCUDA", "NestedTensorCUDA"),
}
# Attributes of torch._C, some of which torch and torch.jit have too, that compute without the dispatcher or
# lead there: TorchScript with its fusers, Static Runtime, oneDNN Graph, and executors of exported programs.
# The functions that are left find operators, such as those that a candidate registers itself.
ENGINES = re.compile(
    r"_jit_(?!get_operation|get_schemas_for_operator|get_all_schemas|resolve_packet)\w+|CompilationUnit|Graph(?:Executor\w*)?|_create_(?:function|method)\w*|_import_ir_module\w*"
    r"|StaticModule|_fuse_to_static_module|_te|_nativert|_aoti|_set_neg|_set_conj"
)


class ForbiddenOperator(Exception):
    """Error raised if a candidate calls a compute operator of torch.

    A candidate is an implementation of a PyTorch module, to be judged, whose own kernels must compute. The
    error's text names the operator, such as `torch_compute:aten.add.Tensor`.
    """


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise ForbiddenOperator(f"torch_compute:{name}")


@functools.cache
def compute_operators(device: str) -> list[tuple[str, str, str]]:
    """Return (dispatch key, namespace, name), such as ("CPU", "aten", "mm"), of each compute operator.

    The keys are "CPU" and, if `device` is cuda, "CUDA". A compute operator is an operator of torch that has a
    kernel for the key or for all devices (CompositeExplicitAutograd), or is one of COMPOSITES, and is not in
    ALLOWED_OPERATORS.
    The result is cached. If this is called before runners (sandboxed processes) are forked, they inherit the
    cache and need no time for it.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [(full, *full.split("::", 1)) for full in torch._C._dispatch_get_all_op_names()]
    return [
        (key, space, name)
        for key in (("CPU", "CUDA") if device == "cuda" else ("CPU",))
        for full, space, name in names
        if name.split(".")[0] not in ALLOWED_OPERATORS
        and (
            has_kernel(full, key)
            or has_kernel(full, "CompositeExplicitAutograd")
            or COMPOSITES.fullmatch(name.split(".")[0])
        )
    ]


@functools.cache
def layout_operators(device: str) -> list[tuple[str, str, str]]:
    """Return (dispatch key, namespace, name) of each operator with a kernel for tensors of another layout.

    These are sparse, quantized, nested and oneDNN's tensors, on cpu and, if `device` is cuda, on a GPU. None
    of these operators is needed, not even those that allocate or copy. Copies of tensors whose values are
    negated or conjugated only when they are read are among them too. The result is cached.
    """
    lazy = [(key, "aten", name) for key in ("Negative", "Conjugate") for name in ("copy_", "clone")]
    names = [(full, *full.split("::", 1)) for full in torch._C._dispatch_get_all_op_names()]
    return lazy + [
        (key, space, name)
        for place in sorted({"cpu", device})
        for key in LAYOUT_KEYS[place]
        for full, space, name in names
        if torch._C._dispatch_has_kernel_for_dispatch_key(full, key)
    ]


def compute_names(device: str) -> frozenset[str]:
    """Return the full names, such as `aten::mm`, of operators that a candidate's constructor may not call.

    A candidate is an implementation of a PyTorch module, to be judged. The operators are those of
    `compute_operators(device)` except those of `may_construct`.
    """
    return frozenset(
        f"{space}::{name}" for _, space, name in compute_operators(device) if not may_construct(name)
    )


def block_operators(device: str) -> Callable[[], None]:
    """Make torch's compute operators raise ForbiddenOperator, except those that a constructor may call.

    Return a function without arguments that blocks these too. Call `block_operators` before any code of the
    candidate (the implementation of a PyTorch module, to be judged) runs, and the returned function after the
    candidate's module is constructed. Compute operators are all operators of torch but those that allocate,
    view or copy (`compute_operators`), and all that work on tensors of other layouts (`layout_operators`).
    The exceptions are the operators of `may_construct`. The fusers of TorchScript are switched off, the
    attributes ENGINES, which compute without operators, are removed, and numpy and scipy cannot be imported
    any more. The returned function does not look up names of this module, so a candidate that replaces them
    changes nothing. A reference to each library object is leaked on purpose, because torch would restore the
    original kernels if the object were garbage collected.
    """
    library, partial, refuse = torch._C._dispatch_library, functools.partial, _refuse
    leak, as_object = ctypes.pythonapi.Py_IncRef, ctypes.py_object

    def block(operators: list[tuple[str, str, str]]) -> None:
        libraries: dict[tuple[str, str], Any] = {}
        for key, space, name in operators:
            if (key, space) not in libraries:
                libraries[key, space] = library("IMPL", space, key, __file__, 0)
                leak(as_object(libraries[key, space]))
            libraries[key, space].impl(name, key, partial(refuse, f"{space}.{name}"))

    operators = compute_operators(device)
    constructors = [operator for operator in operators if may_construct(operator[2])]
    block([operator for operator in operators if not may_construct(operator[2])])
    block(layout_operators(device))
    torch._C._jit_set_texpr_fuser_enabled(False)
    torch._C._jit_override_can_fuse_on_cpu(False)
    torch._C._jit_override_can_fuse_on_gpu(False)
    for engine in filter(ENGINES.fullmatch, list(vars(torch._C))):
        for module in (torch._C, torch, torch.jit):
            vars(module).pop(engine, None)
        sys.modules.pop(f"torch._C.{engine}", None)
    modules: dict[str, Any] = sys.modules
    for name in [one for one in modules if one.partition(".")[0] in ("numpy", "scipy")]:
        modules[name] = None  # an import of the module raises ModuleNotFoundError then
    return partial(block, constructors)


# Operators that a constructor may call besides those that are always allowed, by name without overload.
CONSTRUCTION_OPERATORS = frozenset(
    """
    arange eye full full_like linspace logspace ones ones_like scalar_tensor tril_indices triu_indices
    rand rand_like randint randint_like randn randn_like randperm empty_permuted
    uniform_ normal_ random_ exponential_ log_normal_ cauchy_ geometric_
    _to_copy diagonal unfold split_with_sizes set_ resize_ _cudnn_rnn_flatten_weight""".split()
)
# Overloads that draw with parameters that are numbers. Other overloads of these operators draw with
# parameters from tensors, and thereby compute.
FILLS_WITH_FLOATS = frozenset(["normal.float_float", "normal.float_float_out", "bernoulli_.float"])


def may_construct(name: str) -> bool:
    """Return whether a candidate's constructor may call the operator `name`, such as "normal.float_float".

    A candidate is an implementation of a PyTorch module, to be judged. The result is False for operators that
    every call may use (`ALLOWED_OPERATORS`), although a constructor may call these too.
    """
    return name.split(".")[0] in CONSTRUCTION_OPERATORS or name in FILLS_WITH_FLOATS


class UnknownResult(BaseException):
    """Error raised if a candidate's constructor calls an operator whose result has not been recorded.

    It is a BaseException, so that a constructor that catches Exception does not continue without the result.
    """


class DispatchMode(TorchDispatchMode):
    """Base class of the modes of this file that see every operator that torch's dispatcher calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's constructor has no annotations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap `__torch_dispatch__` in a function that imports Dynamo.

        The import takes two seconds in each process.
        """
        return False


class ConstructorMode(DispatchMode):
    """Mode that records the results of operators, or returns recorded results in place of calling them.

    `names` are the full names of these operators, such as `aten::mul.Tensor`; others run as usual. If
    `recorded` is None, the operators are called and their results are recorded in the attribute `results`.
    This list has a pair for each call in order: the operator's name, and a list with the operator's output,
    or with the arguments that it wrote. Otherwise `recorded` is such a list that another process recorded for
    the same constructor. Raises UnknownResult if a call is not the next one in `recorded`.
    """

    def __init__(self, names: Collection[str], recorded: list[Any] | None):
        super().__init__()
        self.names = names
        self.results: list[Any] = []
        self.recorded: Iterator[tuple[str, list[Any]]] | None = None if recorded is None else iter(recorded)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (name := func.name()) not in self.names:
            return func(*args, **kwargs)
        written = [
            args[i] if i < len(args) else kwargs[argument.name]
            for i, argument in enumerate(func._schema.arguments)
            if argument.is_out or (argument.alias_info is not None and argument.alias_info.is_write)
        ]
        if self.recorded is None:
            output = func(*args, **kwargs)
            self.results.append((name, [copied(value) for value in written or [output]]))
            return output
        recorded_name, values = next(self.recorded, ("", []))
        if recorded_name != name:
            raise UnknownResult(name)
        if not written:
            return values[0]
        for target, value in zip(written, values, strict=True):
            targets, sources = (x if isinstance(x, list) else [x] for x in (target, value))
            for tensor, source in zip(targets, sources, strict=True):
                tensor.resize_(source.shape).copy_(source)
        returns = len(func._schema.returns)
        return written[0] if returns == 1 else tuple(written) if returns else None


def copied(value: Any) -> Any:
    """Return an operator's output with every tensor cloned, so that later writes do not change it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return type(value)(map(copied, value)) if isinstance(value, list | tuple) else value


# Positions of the weights among the arguments of torch's operators for recurrent layers, by name.
RECURRENT_WEIGHTS = {"_cudnn_rnn": slice(1, 2), "mkldnn_rnn_layer": slice(1, 3)}


class OperationCounter(DispatchMode):
    """Context that counts the floating-point operations of products, convolutions and attention.

    `total` is their number so far by torch's formulas; a multiplication and an addition are two. torch's own
    FlopCounterMode counts the same, but imports torch._dynamo at its first use, which takes two seconds in
    each process, and has no formula for recurrent layers. Of these the products of inputs and states with the
    weights are counted here.
    """

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator `func`, add the number of its operations to `total`, and return its output.

        An operator for which there is no formula adds nothing.
        """
        out = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        elif (weights := RECURRENT_WEIGHTS.get(func.overloadpacket.__name__)) is not None:
            steps = args[0].numel() // args[0].shape[-1]
            matrices = (part for part in tree_leaves(args[weights]) if part.ndim == 2)
            self.total += 2 * steps * sum(matrix.numel() for matrix in matrices)
        return out


WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
HALF_DTYPES = (torch.float16, torch.bfloat16)
# Dunder methods that change their first argument; other such functions have names that end with one
# underscore.
CHANGING = frozenset(
    f"__{name}__"
    for name in "iadd isub imul imatmul itruediv ifloordiv imod ipow iand ior ixor setitem set".split()
)


class Float64Mode(TorchFunctionMode):
    """Mode that converts float32 tensors and dtypes in the arguments of every torch function to float64.

    complex64 is converted to complex128 in the same way, and `Tensor.float` returns float64. If `half` is
    set, float16 and bfloat16 are converted to float64 too, and `Tensor.half` and `Tensor.bfloat16` return
    float64. Raises RuntimeError in two cases in which the results would be wrong: if a function changes a
    tensor of such a dtype in place, because it would change a converted copy instead, and if `view`
    reinterprets the bits of a tensor as another dtype.
    """

    def __init__(self, *, half: bool):
        super().__init__()
        self.wider = WIDER | (dict.fromkeys(HALF_DTYPES, torch.float64) if half else {})
        self.casts = [torch.Tensor.float, *([torch.Tensor.half, torch.Tensor.bfloat16] if half else [])]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.casts:
            return args[0].double()
        name = func.__name__
        changed = [kwargs.get("out")]
        if name in CHANGING or (name.endswith("_") and not name.endswith("__")):
            changed.append(args[0])
        if any(isinstance(value, torch.Tensor) and value.dtype in self.wider for value in changed):
            raise RuntimeError(f"{name} changes a tensor in place whose dtype is converted")
        if func is torch.Tensor.view and any(
            isinstance(value, torch.dtype) for value in (*args, *kwargs.values())
        ):
            raise RuntimeError("view reinterprets the bits of a tensor")
        args, kwargs = tree_map(self._widened, (args, kwargs))
        if name == "rms_norm" and (args[3] if len(args) > 3 else kwargs.get("eps")) is None:
            # The default depends on the dtype; half precision is computed in float32.
            args, kwargs = args[:3], kwargs | {"eps": torch.finfo(torch.float32).eps}
        return func(*args, **kwargs)

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self.wider.get(value, value)
        if isinstance(value, torch.Tensor) and value.dtype in self.wider:
            return value.to(self.wider[value.dtype])
        return value


@contextlib.contextmanager
def computing_in_float64(written_for: torch.dtype = torch.float32) -> Iterator[None]:
    """Return a context in which code that was written for the dtype `written_for` computes in float64.

    float64 is the default dtype too. `torch.finfo` describes `written_for` in place of float64, because its
    figures are constants of the computation, for example the `eps` of a normalisation. Code that was written
    for float32 may name float16 or bfloat16 to round on purpose; these are converted only if `written_for` is
    one of them.
    """
    finfo, default = torch.finfo, torch.get_default_dtype()

    def finfo_of_source(dtype: torch.dtype = torch.float32) -> torch.finfo:
        return finfo(written_for if dtype == torch.float64 else dtype)

    torch.set_default_dtype(torch.float64)
    torch.finfo = finfo_of_source  # type: ignore[assignment,misc]
    try:
        with Float64Mode(half=written_for in HALF_DTYPES):
            yield
    finally:
        torch.finfo = finfo  # type: ignore[misc]
        torch.set_default_dtype(default)
