"""Blocking torch's compute operators in a candidate's process: a kernel is wanted, not a call to torch.

The kernels themselves are replaced in torch's dispatcher, for every thread and until the process ends. A
dispatch mode would block the same calls, but a candidate can see whether one is set, and a mode that is
always set costs time in every call. This file runs inside the sandbox only.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

ALLOWED_OPERATORS = frozenset(
    """
    empty empty_strided empty_like new_empty new_empty_strided zeros zeros_like new_zeros view _unsafe_view
    reshape alias detach as_strided slice select unsqueeze squeeze expand permute transpose t contiguous
    clone split unbind narrow lift_fresh _reshape_alias is_pinned copy_ fill_ zero_ _foreach_copy_""".split()
)
"""Allocations, views and copies.

zeros and clone are made of the last four, which runner_roles.py needs to deliver results, too.
"""


class ForbiddenOperator(Exception):
    """The candidate called an operator of torch that computes."""


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise ForbiddenOperator(f"torch_compute:{name}")


@functools.cache
def compute_operators(key: str) -> list[tuple[str, str]]:
    """Return namespace and name of every operator that computes for a dispatch key.

    Call it once before runners are forked.
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

    Prepare before the candidate's code runs and block after its module is made: names that the candidate
    replaces in this module then change nothing. A replaced kernel comes back when its library object is
    collected, so one reference of each is leaked.
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
