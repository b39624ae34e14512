"""Block torch's compute operators in the process of a candidate.

A candidate is an implementation of a PyTorch module, to be judged. If the parameter sandbox.rules is
`kernel-only`, it must use its own kernels instead of torch's compute operators (`block_operators`). The
functions that torch's dispatcher calls for these operators are replaced before any of the candidate's code
runs, for all threads and until the process ends. So the candidate gets the original functions neither by a
look-up in the dispatcher nor in a CUDA graph that it captures. A dispatch mode could block the same calls,
but a candidate can see whether a mode is set, and a mode that is always set costs time in every call. If a
candidate's constructor calls compute operators, it gets results that were recorded in another process
(constructor_mode.py).

This file runs only inside the sandbox; the judge never imports it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from constructor_mode import may_construct

# Operators that stay allowed: allocations, views and copies. The last four are allowed because zeros and
# clone call them, and because delivery.py delivers results with them.
ALLOWED_OPERATORS = frozenset(
    """
    empty empty_strided empty_like new_empty new_empty_strided zeros zeros_like new_zeros view _unsafe_view
    reshape alias detach as_strided slice select unsqueeze squeeze expand permute transpose t contiguous
    clone split unbind narrow lift_fresh _reshape_alias is_pinned copy_ fill_ zero_ _foreach_copy_""".split()
)
# Attributes of torch._C whose functions compute without the dispatcher: Static Runtime, the fuser of
# TorchScript, oneDNN Graph, and executors of exported programs.
ENGINES = (
    *("StaticModule", "_jit_to_static_module", "_fuse_to_static_module", "_te"),
    *("_jit_set_llga_enabled", "_nativert", "_aoti"),
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
    kernel for the key, or one for all devices (CompositeExplicitAutograd), and is not in ALLOWED_OPERATORS.
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
        and (has_kernel(full, key) or has_kernel(full, "CompositeExplicitAutograd"))
    ]


def compute_names(device: str) -> frozenset[str]:
    """Return the full names, such as `aten::mm`, of operators that a candidate's constructor may not call.

    A candidate is an implementation of a PyTorch module, to be judged. The operators are those of
    `compute_operators(device)` except those of `constructor_mode.may_construct`.
    """
    return frozenset(
        f"{space}::{name}" for _, space, name in compute_operators(device) if not may_construct(name)
    )


def block_operators(device: str) -> Callable[[], None]:
    """Make torch's compute operators raise ForbiddenOperator, except those that a constructor may call.

    Return a function without arguments that blocks these too. Call `block_operators` before any code of the
    candidate (the implementation of a PyTorch module, to be judged) runs, and the returned function after the
    candidate's module is constructed. Compute operators are all operators of torch but those that allocate,
    view or copy (`compute_operators`). The exceptions are the operators of `constructor_mode.may_construct`.
    The attributes ENGINES of torch._C, which compute without operators, are removed. The returned function
    does not look up names of this module, so a candidate that replaces them changes nothing. A reference to
    each library object is leaked on purpose, because torch would restore the original kernels if the object
    were garbage collected.
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
    for engine in ENGINES:
        vars(torch._C).pop(engine, None)
        sys.modules.pop(f"torch._C.{engine}", None)
    return partial(block, constructors)
