"""Load the module of a task or of a candidate, and make inputs by the task's own `get_inputs`.

A task is a PyTorch module that is to be made faster, and a candidate is an implementation of it, to be
judged. This file runs only inside the sandbox; the judge never imports it.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import inline_extension
import reference
import torch
from delivery import Call
from runner_support import SharedTensors, construct, define_module, eval_mode

if TYPE_CHECKING:
    from components.sandbox.inside.runner_protocol import RoleHeader


def own_inputs(task: types.ModuleType, device: str) -> list[Any]:
    """Return the arguments of a call that the function `get_inputs` of the module `task` makes, on `device`.

    Tensors are contiguous, as in timed calls, because Triton and torch.compile compile kernels for the
    strides of their arguments. Any error of the task's source is raised.
    """
    inputs = reference.make_inputs(task, device)
    return [value.to(device).contiguous() if isinstance(value, torch.Tensor) else value for value in inputs]


def call_with_own_inputs(header: RoleHeader, libraries: bytes) -> Callable[[], Any]:
    """Construct a candidate, and return a function that calls it with inputs of the task's `get_inputs`.

    A candidate is an implementation of a task's module that is judged. `header` has the sources of both, and
    `libraries` is what `construct_candidate` expects. Every call gets the same inputs. Any error is raised.
    """
    device = header["device"]
    task = define_module("model", header["code"])
    arguments = own_inputs(task, device)
    os.remove(str(task.__file__))  # the candidate has no use for the task's own implementation
    del sys.modules["model"]
    return functools.partial(eval_mode(construct_candidate(header, libraries), device), *arguments)


def construct_candidate(header: RoleHeader, libraries: bytes) -> torch.nn.Module:
    """Write a candidate's files to the working folder and return an object of its class `ModelNew`.

    A candidate is an implementation of a PyTorch module, to be judged. `header` has its files and the
    arguments of its constructor. `libraries` has the bytes of its compiled library, or of the libraries of
    all its extensions, one after another; it is empty if the candidate has none. Any error of the candidate's
    code is raised.
    """
    if header["extensions"] is not None:
        inline_extension.install(header["extensions"], libraries, header["suffix"])
    elif libraries:
        Path(f"cuda_extension{header['suffix']}").write_bytes(libraries)
    inline_extension.write_files(header["files"])
    module: torch.nn.Module = construct(importlib.import_module("model_new").ModelNew, header)
    return module


def load_baseline(header: RoleHeader, shared: SharedTensors) -> Call:
    """Return the task's own model with the judge's parameters, compiled if the role is `compile`.

    A task is a PyTorch module that is to be made faster. `header` has its source, the role and the mode of
    torch.compile, and `shared` has the parameters. Raises RuntimeError if the parameters do not fit the
    model, and any error of the task's source.
    """
    module = construct(define_module("model", header["code"]).Model, header)
    shared.load_parameters(module)
    module = eval_mode(module, shared.device)
    return torch.compile(module, mode=header["compile_mode"]) if header["role"] == "compile" else module
