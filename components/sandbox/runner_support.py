"""What every role inside the sandbox needs.

The judge's shared memory as tensors, and a module made of source text.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shared_memory
import torch

if TYPE_CHECKING:
    from components.sandbox.runner_protocol import RegionName, RoleHeader

REGIONS: tuple[RegionName, ...] = ("parameters", "inputs", "outputs", "expected")
"""In the order in which the judge sends their descriptors."""


def define_module(name: str, code: str) -> types.ModuleType:
    """Execute `code` as a module that can be imported by name: dataclasses and torch.compile do so."""
    module = types.ModuleType(name)
    module.__file__ = f"{os.getcwd()}/{name}.py"
    Path(module.__file__).write_text(code)
    sys.modules[name] = module
    exec(compile(code, module.__file__, "exec"), module.__dict__)
    return module


def flatten_outputs(value: Any) -> list[Any]:
    """Return the tensors of an output: a tensor, or a tuple or list of outputs."""
    if type(value) in (tuple, list):
        return [leaf for item in value for leaf in flatten_outputs(item)]
    return [value]


def eval_mode(module: torch.nn.Module, device: str) -> torch.nn.Module:
    """Move a module to the device, for inference only."""
    return module.to(device).eval().requires_grad_(False)


class SharedTensors:
    """The memory that one role shares with the judge.

    Parameters, and inputs and outputs of several input sets.
    """

    def __init__(self, header: RoleHeader, descriptors: list[int]):
        self.device = header["device"]
        self.layout = header["layout"]
        names = [name for name in REGIONS if "bytes" in self.layout.get(name, {})]
        self.buffers = {
            name: shared_memory.make_buffer(self.device, self.layout[name]["bytes"], descriptor)
            for name, descriptor in zip(names, descriptors, strict=True)
        }

    def close(self) -> None:
        """Free the memory; no tensor of it may be used afterwards."""
        for buffer in self.buffers.values():
            buffer.close()

    def tensors(self, name: RegionName, index: int = 0) -> list[torch.Tensor]:
        """Return views of a region's tensors in input set `index`."""
        region = self.layout[name]
        base = index * region["stride"]
        return [
            self.buffers[name].tensor(shared_memory.Slot(base + offset, tuple(shape), dtype))
            for offset, shape, dtype in region["slots"]
        ]

    def zero_outputs(self, sets: int) -> list[list[torch.Tensor]]:
        """Return zeros in the form of the outputs of `sets` calls, in memory that is not shared."""
        slots = self.layout["outputs"]["slots"]
        return [
            [torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device) for _, shape, dtype in slots]
            for _ in range(sets)
        ]

    def arguments(self, index: int) -> list[Any]:
        """Return the arguments of one call: shared tensors, and other values from the layout."""
        tensors = iter(self.tensors("inputs", index))
        return [next(tensors) if scalar is None else scalar[0] for scalar in self.layout["scalars"]]

    def load_parameters(self, module: torch.nn.Module) -> None:
        """Copy the judge's parameters into `module` by name."""
        values = zip(self.layout["names"], self.tensors("parameters"), strict=True)
        module.load_state_dict({name: value.clone() for name, value in values}, strict=True)
