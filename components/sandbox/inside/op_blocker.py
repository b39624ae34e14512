"""Blocker of torch's compute operators in a candidate's process, which must use its own kernels instead.

The operators' kernels are replaced in torch's dispatcher, for all threads and until the process ends. A
dispatch mode could block the same calls, but a candidate can see whether a mode is set, and a mode that is
always set costs time in every call. This file runs only inside the sandbox.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

# Operators that stay allowed: allocations, views and copies. The last four are allowed because zeros and
# clone call them, and because runner_roles.py delivers results with them.
ALLOWED_OPERATORS = frozenset(
    """
    empty empty_strided empty_like new_empty new_empty_strided zeros zeros_like new_zeros view _unsafe_view
    reshape alias detach as_strided slice select unsqueeze squeeze expand permute transpose t contiguous
    clone split unbind narrow lift_fresh _reshape_alias is_pinned copy_ fill_ zero_ _foreach_copy_""".split()
)


class ForbiddenOperator(Exception):
    """Error raised if a candidate calls an operator of torch that computes."""


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise ForbiddenOperator(f"torch_compute:{name}")


@functools.cache
def compute_operators(key: str) -> list[tuple[str, str]]:
    """Return the namespace and name of every operator that has a kernel for `key` and is not allowed.

    `key` is a dispatch key of torch, "CPU" or "CUDA". The result is cached. If this is called before runners
    are forked, they inherit the cache and need no time for it.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [(full, *full.split("::", 1)) for full in torch._C._dispatch_get_all_op_names()]
    return [
        (space, name)
        for full, space, name in names
        if name.split(".")[0] not in ALLOWED_OPERATORS
        and (has_kernel(full, key) or has_kernel(full, "CompositeExplicitAutograd"))
    ]


def prepare_operator_block(device: str) -> Callable[[], None]:
    """Return a function that makes every compute operator raise ForbiddenOperator.

    Call this before the candidate's code runs, and the returned function after the candidate's module is
    made. The returned function does not look up names of this module, so a candidate that replaces them
    changes nothing. A reference to each library object is leaked on purpose, because the original kernels
    would be restored if the object were garbage collected.
    """
    keys = ("CPU", "CUDA") if device == "cuda" else ("CPU",)
    operators = tuple((key, tuple(compute_operators(key))) for key in keys)
    library, partial, refuse = torch._C._dispatch_library, functools.partial, _refuse
    leak, as_object = ctypes.pythonapi.Py_IncRef, ctypes.py_object

    def block() -> None:
        for key, names in operators:
            libraries: dict[str, Any] = {}
            for space, name in names:
                if space not in libraries:
                    libraries[space] = library("IMPL", space, key, __file__, 0)
                    leak(as_object(libraries[space]))
                libraries[space].impl(name, key, partial(refuse, f"{space}.{name}"))

    return block
