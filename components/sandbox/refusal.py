"""A kernel is wanted, not a call to torch: a candidate's process in which torch computes nothing any more.

The kernels themselves are replaced in torch's dispatcher, for every thread and until the process ends. A dispatch mode would
refuse the same calls, but a candidate can see when one is set, and a mode that is always set costs time in every call.
This file runs inside the sandbox only.
"""

from __future__ import annotations

import functools
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
        if name.split(".")[0] not in ALLOCATION_AND_VIEWS and (has_kernel(full, key) or has_kernel(full, "CompositeExplicitAutograd"))
    ]


_libraries: list[Any] = []
"""What is replaced comes back when its library is collected: these live as long as the process."""


def refuse_compute(device: str) -> None:
    """From now on every operator but allocations and views raises Forbidden; about 20 ms."""
    for key in ("CPU", "CUDA") if device == "cuda" else ("CPU",):
        libraries: dict[str, Any] = {}
        for space, name in compute_operators(key):
            if space not in libraries:
                libraries[space] = torch._C._dispatch_library("IMPL", space, key, __file__, 0)
            libraries[space].impl(name, key, functools.partial(_refuse, f"{space}.{name}"))
        _libraries.extend(libraries.values())
