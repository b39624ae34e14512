"""What every part inside the sandbox needs: the judge's shared memory as tensors, and a module made of source text."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import shared_memory
import torch


def module_of(name: str, code: str) -> types.ModuleType:
    """The module that `code` defines, findable by name, since dataclasses and torch.compile look it up."""
    module = types.ModuleType(name)
    module.__file__ = f"{os.getcwd()}/{name}.py"
    Path(module.__file__).write_text(code)
    sys.modules[name] = module
    exec(compile(code, module.__file__, "exec"), module.__dict__)
    return module


def flat(value: Any) -> list[Any]:
    """Tensors of an output: a tensor, or a tuple or list of outputs."""
    if type(value) in (tuple, list):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


class Shared:
    """The shared memory of one arm: parameters, and `sets` of inputs and outputs, each set at its own stride."""

    def __init__(self, header: dict, descriptors: list[int]):
        self.device = header["device"]
        self.layout = header["layout"]
        names = [
            name
            for name in ("parameters", "inputs", "outputs", "expected")
            if "bytes" in self.layout.get(name, {})
        ]
        self.buffers = {
            name: shared_memory.make_buffer(self.device, self.layout[name]["bytes"], descriptor)
            for name, descriptor in zip(names, descriptors, strict=True)
        }

    def close(self) -> None:
        """Give the memory back; no tensor of it may be used afterwards."""
        for buffer in self.buffers.values():
            buffer.close()

    def tensors(self, name: str, index: int = 0) -> list[torch.Tensor]:
        part = self.layout[name]
        base = index * part["stride"]
        return [
            self.buffers[name].tensor(shared_memory.Slot(base + offset, tuple(shape), dtype))
            for offset, shape, dtype in part["slots"]
        ]

    def outputs(self, sets: int) -> list[list[torch.Tensor]]:
        """Zeros in the form of the outputs of each of `sets` calls, in memory that is not shared."""
        form = [(tuple(shape), getattr(torch, dtype)) for _, shape, dtype in self.layout["outputs"]["slots"]]
        return [
            [torch.zeros(shape, dtype=dtype, device=self.device) for shape, dtype in form]
            for _ in range(sets)
        ]

    def arguments(self, index: int) -> list[Any]:
        """Arguments of one call: tensors out of the shared memory, other values from the layout."""
        tensors = iter(self.tensors("inputs", index))
        return [next(tensors) if scalar is None else scalar[0] for scalar in self.layout["scalars"]]

    def load(self, module: torch.nn.Module) -> None:
        """Give `module` the judge's parameters by name; its own copy, so that it may not change theirs."""
        state = {
            name: tensor.clone()
            for name, tensor in zip(self.layout["names"], self.tensors("parameters"), strict=True)
        }
        module.load_state_dict(state, strict=True)


def eval_mode(module: torch.nn.Module, device: str) -> torch.nn.Module:
    return module.to(device).eval().requires_grad_(False)
