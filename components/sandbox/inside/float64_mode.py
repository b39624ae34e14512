"""A mode in which code that names float32 computes in float64, without a change of its source.

Inside the context `computing_in_float64`, the arguments of every torch function are converted at the call:
float32 tensors and dtypes are replaced by float64. Code for which this would give wrong results is rejected
with RuntimeError (`Float64Mode`).

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
# Dunder methods that change their first argument; other such functions have names that end with one
# underscore.
CHANGING = frozenset(
    f"__{name}__"
    for name in "iadd isub imul imatmul itruediv ifloordiv imod ipow iand ior ixor setitem set".split()
)


class Float64Mode(TorchFunctionMode):
    """Mode that converts float32 tensors and dtypes in the arguments of every torch function to float64.

    complex64 is converted to complex128 in the same way, and `Tensor.float` returns float64. Raises
    RuntimeError in two cases in which the results would be wrong: if a function changes a float32 tensor in
    place, because it would change a converted copy instead, and if `view` reinterprets the bits of a tensor
    as another dtype.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            return args[0].double()
        name = func.__name__
        changed = [kwargs.get("out")]
        if name in CHANGING or (name.endswith("_") and not name.endswith("__")):
            changed.append(args[0])
        if any(isinstance(value, torch.Tensor) and value.dtype in WIDER for value in changed):
            raise RuntimeError(f"{name} changes a float32 tensor in place")
        if func is torch.Tensor.view and any(
            isinstance(value, torch.dtype) for value in (*args, *kwargs.values())
        ):
            raise RuntimeError("view reinterprets the bits of a tensor")
        args, kwargs = tree_map(_widened, (args, kwargs))
        if name == "rms_norm" and (args[3] if len(args) > 3 else kwargs.get("eps")) is None:
            # The default depends on the dtype.
            args, kwargs = args[:3], kwargs | {"eps": torch.finfo(torch.float64).eps}
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return WIDER.get(value, value)
    if isinstance(value, torch.Tensor) and value.dtype in WIDER:
        return value.to(WIDER[value.dtype])
    return value


@contextlib.contextmanager
def computing_in_float64() -> Iterator[None]:
    """Return a context in which code that was written for float32 computes in float64.

    float64 is the default dtype too. `torch.finfo` describes float32 in place of float64, because its figures
    are constants of the computation, for example the `eps` of a normalisation.
    """
    finfo, default = torch.finfo, torch.get_default_dtype()

    def finfo_of_float32(dtype: torch.dtype = torch.float32) -> torch.finfo:
        return finfo(torch.float32 if dtype == torch.float64 else dtype)

    torch.set_default_dtype(torch.float64)
    torch.finfo = finfo_of_float32  # type: ignore[assignment,misc]
    try:
        with Float64Mode():
            yield
    finally:
        torch.finfo = finfo  # type: ignore[misc]
        torch.set_default_dtype(default)
