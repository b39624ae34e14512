"""Give runners access to the memory shared with the judge as tensors, and make modules from source text.

A runner is a sandboxed process; several of its roles (what it executes) use these functions.
"""

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shared_memory
import torch

if TYPE_CHECKING:
    from components.sandbox.inside.runner_protocol import RegionName, RoleHeader

# Names of the shared regions, in the order in which the judge sends the descriptors of their buffers.
REGIONS: "tuple[RegionName, ...]" = (
    *("parameters", "inputs", "outputs", "expected"),
    *("next_inputs", "last_outputs"),
)


def define_module(name: str, code: str) -> types.ModuleType:
    """Execute the source `code` as a new module called `name`, and return the module.

    The source is also written to the file `name`.py in the working folder, and the module is registered in
    sys.modules, because dataclasses and torch.compile look it up by name. Any error of the code is raised.
    """
    module = types.ModuleType(name)
    module.__file__ = f"{os.getcwd()}/{name}.py"
    Path(module.__file__).write_text(code)
    sys.modules[name] = module
    exec(compile(code, module.__file__, "exec"), module.__dict__)
    return module


def construct(model: type[torch.nn.Module], header: "RoleHeader") -> torch.nn.Module:
    """Return an object of the class `model`, made with the constructor arguments in `header`.

    If the `construction_seed` in `header` is not None, torch is seeded with it first. Any error of the
    constructor is raised.
    """
    if header["construction_seed"] is not None:
        torch.manual_seed(header["construction_seed"])
    return model(*map(restored, header["init_inputs"]))


def plain(value: Any, place: str) -> Any:
    """Return an argument in a form that JSON keeps: tuples and dictionaries are marked by one key.

    For example, `(1, 2)` becomes `{"tuple": [1, 2]}`, and `{3: 4}` becomes `{"dict": [[3, 4]]}`. Raises
    TypeError, whose text calls the argument `place` (such as `get_inputs()`), if it contains anything but
    numbers, strings, None, lists, tuples and dictionaries.
    """
    if isinstance(value, tuple):
        return {"tuple": [plain(item, place) for item in value]}
    if isinstance(value, list):
        return [plain(item, place) for item in value]
    if isinstance(value, dict):
        return {"dict": [[plain(key, place), plain(item, place)] for key, item in value.items()]}
    if value is None or isinstance(value, int | float | str):
        return value
    raise TypeError(
        f"{place} has a {type(value).__name__}; besides tensors as inputs of their own, only numbers, "
        "strings, None, and lists, tuples and dictionaries of them can be handed to a candidate"
    )


def restored(value: Any) -> Any:
    """Return the argument for which `plain` has returned `value`."""
    if isinstance(value, dict) and "tuple" in value:
        return tuple(map(restored, value["tuple"]))
    if isinstance(value, dict):
        return {restored(key): restored(item) for key, item in value["dict"]}
    return [restored(item) for item in value] if isinstance(value, list) else value


def _bound_flatten_outputs() -> Callable[[Any], list[Any]]:
    """Return the function `flatten_outputs`, which looks up no name that a candidate could replace later."""
    is_subclass, type_of, kinds = issubclass, type, (tuple, list)

    def flatten_outputs(value: Any) -> list[Any]:
        """Return the leaves of an output, which is a tensor or a nested tuple or list of tensors, in order.

        Of an object of a subclass of tuple or list, the items that the object holds are returned. The method
        `__iter__` of the subclass, which could compute items late, is not called.
        """
        for kind in kinds:
            if is_subclass(type_of(value), kind):
                return [leaf for item in kind.__iter__(value) for leaf in flatten_outputs(item)]
        return [value]

    return flatten_outputs


flatten_outputs = _bound_flatten_outputs()


def eval_mode(module: torch.nn.Module, device: str) -> torch.nn.Module:
    """Return the module, moved to the device and set to evaluation mode without gradients."""
    return module.to(device).eval().requires_grad_(False)


class SharedTensors:
    """The memory that this process shares with the judge while it has one role (what it executes).

    The memory contains parameters, and the inputs and outputs of several input sets (the tensors of one call
    each), at the places that `header["layout"]` states. `descriptors` are those of the buffers, in the order
    of REGIONS; there is one for each region of the layout that has a size.
    """

    def __init__(self, header: "RoleHeader", descriptors: list[int]):
        self.device = header["device"]
        self.layout = header["layout"]
        names = [name for name in REGIONS if "bytes" in self.layout.get(name, {})]
        # Addresses of the buffers in host memory that `pin` has registered with CUDA.
        self.pinned: list[int] = []
        self.buffers = {
            name: shared_memory.make_buffer(
                self.layout[name]["device"], self.layout[name]["bytes"], descriptor
            )
            for name, descriptor in zip(names, descriptors, strict=True)
        }

    def close(self) -> None:
        """Free the shared memory; its tensors must not be used afterwards."""
        for address in self.pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        for buffer in self.buffers.values():
            buffer.close()

    def pin(self, name: "RegionName") -> None:
        """Register the buffer `name` in host memory with CUDA, for GPU copies without a staging buffer.

        Raises RuntimeError if CUDA refuses it.
        """
        memory = self.buffers[name].raw()
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister failed with CUDA error {int(code)}")
        self.pinned.append(memory.data_ptr())

    def tensors(
        self, name: "RegionName", index: int = 0, *, buffer: "RegionName | None" = None
    ) -> list[torch.Tensor]:
        """Return the tensors of the region `name` for input set `index`, as views of the shared memory.

        A region is a part of this memory such as `inputs` or `outputs`, and an input set is the tensors of
        one call. If `buffer` is given, their offsets and shapes are those of the region `name`, but the views
        lie in the memory of the region `buffer`.
        """
        region = self.layout[name]
        base = index * region["stride"]
        return [
            self.buffers[buffer or name].tensor(shared_memory.Slot(base + offset, tuple(shape), dtype))
            for offset, shape, dtype in region["slots"]
        ]

    def zero_outputs(self, *, share_elements: bool = False) -> list[torch.Tensor]:
        """Return zeros, not in shared memory, with the shapes and dtypes of the outputs of a call.

        If `share_elements` is set, all elements of a tensor are one element in memory.
        """
        zeros = []
        for _, shape, dtype in self.layout["outputs"]["slots"]:
            element = torch.zeros((), dtype=getattr(torch, dtype), device=self.device).expand(shape)
            zeros.append(element if share_elements else element.contiguous())
        return zeros

    def noop_outputs(self) -> list[list[torch.Tensor]]:
        """Return, for each call of a round, tensors that the no-op can deliver in place of computed outputs.

        A round is a series of calls that are timed together, and the no-op is a process that computes
        nothing. The tensors of a call have the shapes and dtypes of its outputs; their values do not matter.
        They are zeros in memory of their own if the layout has more input sets (the tensors of one call) than
        calls, as when device memory suffices, or if the outputs of a round do not fit into the buffer of the
        inputs. Otherwise they are views of that buffer.
        """
        calls = self.layout["calls"]
        is_large = self.layout["outputs"]["stride"] * calls > self.buffers["inputs"].size
        if self.layout["sets"] > calls or is_large:
            return [self.zero_outputs() for _ in range(calls)]
        return [self.tensors("outputs", index, buffer="inputs") for index in range(calls)]

    def arguments(self, index: int) -> list[Any]:
        """Return the arguments of a call on input set `index`: tensors in shared memory, and other values.

        An input set is the tensors of one call. The other values, which are no tensors, are the `scalars` of
        the memory layout and are equal in all sets.
        """
        tensors = iter(self.tensors("inputs", index))
        scalars = self.layout["scalars"]
        return [next(tensors) if scalar is None else restored(scalar[0]) for scalar in scalars]

    def load_parameters(self, module: torch.nn.Module) -> None:
        """Copy the judge's parameters into `module` by name.

        The parameters are all entries of the state dict. Raises RuntimeError, which lists the differences, if
        the module has parameters of other names or shapes.
        """
        values = dict(zip(self.layout["names"], self.tensors("parameters"), strict=True))
        own = module.state_dict().keys()
        if own != values.keys():
            raise RuntimeError(
                f"the parameters of {type(module).__name__} have other names than those of Model: missing "
                f"{sorted(values.keys() - own)}, unexpected {sorted(own - values.keys())}. Name them as in "
                "Model, or judge with --weights seed, which needs no common names."
            )
        module.load_state_dict(values, strict=True)
