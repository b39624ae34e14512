"""A kernel is wanted, not a call to torch: a candidate's process in which torch computes nothing any more.

The kernels themselves are replaced in torch's dispatcher, for every thread and until the process ends. A dispatch mode would
refuse the same calls, but a candidate can see when one is set, and a mode that is always set costs time in every call.
This file runs inside the sandbox only.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

ALLOCATION_AND_VIEWS = frozenset(
    """empty empty_strided empty_like new_empty new_empty_strided zeros zeros_like new_zeros view _unsafe_view reshape alias detach
    as_strided slice select unsqueeze squeeze expand permute transpose t contiguous clone split unbind narrow lift_fresh
    _reshape_alias is_pinned copy_ fill_ zero_ _foreach_copy_""".split()
)
"""The last four are what zeros and clone are made of, and what hands over results (arms.py)."""


class Forbidden(Exception):
    """The candidate asked torch for a computation that SKILL.md forbids."""


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise Forbidden(f"torch_compute:{name}")


@functools.cache
def compute_operators(key: str) -> list[tuple[str, str]]:
    """Namespace and name of every operator that computes for the dispatch key; asked once, before runners are forked."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    named = [(full, *full.split("::", 1)) for full in torch._C._dispatch_get_all_op_names()]
    return [
        (space, name)
        for full, space, name in named
        if name.split(".")[0] not in ALLOCATION_AND_VIEWS
        and (has_kernel(full, key) or has_kernel(full, "CompositeExplicitAutograd"))
    ]


def prepare_operator_block(device: str) -> Callable[[], None]:
    """What makes every operator but allocations and views raise Forbidden, in about 20 ms.

    Asked for before the candidate's code runs, and called after its module is made: whatever it puts in the place of names here changes
    nothing. What is replaced would come back when its library is collected, so one reference more is counted than anybody holds.
    """
    keys = ("CPU", "CUDA") if device == "cuda" else ("CPU",)
    operators = tuple((key, tuple(compute_operators(key))) for key in keys)
    library, partial, refuse, keep = (
        torch._C._dispatch_library,
        functools.partial,
        _refuse,
        ctypes.pythonapi.Py_IncRef,
    )
    entity = ctypes.py_object

    def install() -> None:
        for key, named in operators:
            libraries: dict[str, Any] = {}
            for space, name in named:
                if space not in libraries:
                    libraries[space] = library("IMPL", space, key, __file__, 0)
                    keep(entity(libraries[space]))
                libraries[space].impl(name, key, partial(refuse, f"{space}.{name}"))

    return install
