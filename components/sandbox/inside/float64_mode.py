"""A mode in which code that names float32 computes in float64, without a change of its source.

Inside the context `computing_in_float64`, the arguments of every torch function are converted at the call:
float32 tensors and dtypes are replaced by float64, and for a task in half precision float16 and bfloat16 too.
Code for which this would give wrong results is rejected with RuntimeError (`Float64Mode`).

This file runs only inside the sandbox; the judge never imports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

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
