"""The runner roles `describe` and `reference`, which run a task's own source for the judge.

In the role `describe` a runner reports the task's shapes, dtypes and names. In the role `reference` it writes
inputs, parameters and expected outputs to shared memory. The source is untrusted, so this file runs only
inside the sandbox; the judge never imports it.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
import types
from typing import TYPE_CHECKING, Any

import torch
from float64_mode import computing_in_float64
from input_distributions import INPUT_DISTRIBUTIONS
from runner_support import SharedTensors, define_module, eval_mode, flatten_outputs

if TYPE_CHECKING:
    from components.sandbox.runner_protocol import RoleHeader

# Time for which `describe` repeats the model's call to measure its duration.
TIMING_SECONDS = 0.02


def describe(code: str, device: str) -> dict[str, Any]:
    """Return the shapes, dtypes and names that the judge needs to lay out shared memory for a task.

    `code` is the task's source. The result contains only values that JSON can represent.
    """
    module = define_module("model", code)
    torch.manual_seed(0)
    init_inputs = module.get_init_inputs()
    json.dumps(init_inputs)  # raises if JSON cannot represent them
    model = eval_mode(module.Model(*init_inputs), device)
    inputs = make_inputs(module, device)
    arguments = [value.to(device) if isinstance(value, torch.Tensor) else value for value in inputs]
    with torch.no_grad():
        outputs = flatten_outputs(model(*arguments))
        seconds, end = math.inf, time.perf_counter() + TIMING_SECONDS
        while seconds == math.inf or time.perf_counter() < end:
            start = time.perf_counter()
            outputs = flatten_outputs(model(*arguments))
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = min(seconds, time.perf_counter() - start)

    def form(tensor: torch.Tensor) -> tuple[list[int], str]:
        return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    return {
        "init_inputs": init_inputs,
        "inputs": [form(value) if isinstance(value, torch.Tensor) else None for value in inputs],
        "scalars": [None if isinstance(value, torch.Tensor) else [value] for value in inputs],
        "outputs": [form(tensor) for tensor in outputs],
        "state": [(name, *form(tensor)) for name, tensor in model.state_dict().items()],
        "parameters": [name for name, _ in model.named_parameters()],
        # The judge only chooses the number of calls in a round and of simultaneous tasks according to these
        # two values; no result depends on them.
        "seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else 0,
    }


def make_inputs(module: types.ModuleType, device: str) -> list[Any]:
    """Return the result of the task's `get_inputs()`.

    With `device` "cuda" the tensors are made on the GPU, if the source allows it, because one CPU core is
    slow at making large random tensors.
    """
    if device == "cuda":
        try:
            with torch.device(device):
                return list(module.get_inputs())
        except RuntimeError:  # the source combines the tensors with tensors in host memory
            pass
    return list(module.get_inputs())


class ReferenceModel:
    """A task's model, which computes parameters, inputs and expected outputs for the judge's secret seeds."""

    def __init__(self, header: RoleHeader, shared: SharedTensors):
        self.shared = shared
        self.module = sys.modules.get("model") or define_module("model", header["code"])
        torch.manual_seed(0)
        self.model = eval_mode(self.module.Model(*header["init_inputs"]), shared.device)
        self.initial = {name: value.clone() for name, value in self.model.state_dict().items()}
        # Arguments and result of the last call of `parameters`, kept because input sets share parameters.
        self.latest: tuple[tuple[int, str | None], dict[str, torch.Tensor]] = ((-1, None), {})

    def parameters(self, seed: int, only: str | None = None) -> dict[str, torch.Tensor]:
        """Return the model's state with random floating-point values, by state-dict name.

        If `only` is given, only the tensor of that name is random and the other tensors have their initial
        values. Scales differ from 1 and biases from 0, so that a candidate that ignores them is wrong.
        """
        if (seed, only) == self.latest[0]:
            return self.latest[1]
        device = self.shared.device
        generator = torch.Generator(device).manual_seed(seed)
        state = {}
        for name, value in self.initial.items():
            if not value.is_floating_point() or (only is not None and name != only):
                state[name] = value
                continue
            noise = torch.randn(value.shape, generator=generator, device=device).to(value)
            factor = (torch.rand(value.shape, generator=generator, device=device) + 0.5).to(value)
            positive = name.endswith("running_var")
            state[name] = factor if positive else value * factor + (0.1 * noise if value.dim() < 2 else 0)
        self.latest = ((seed, only), state)
        return state

    def inputs(self, seed: int, distribution: str) -> list[Any]:
        """Return the arguments of one call, drawn with `seed` and changed to the named input distribution.

        Only floating-point tensors are changed (`INPUT_DISTRIBUTIONS`).
        """
        torch.manual_seed(seed)
        change = INPUT_DISTRIBUTIONS[distribution]
        values = make_inputs(self.module, self.shared.device)
        moved = [
            value.to(self.shared.device) if isinstance(value, torch.Tensor) else value for value in values
        ]
        return [change(value).contiguous() if is_float_tensor(value) else value for value in moved]

    def float64_outputs(self, inputs: list[Any]) -> list[torch.Tensor]:
        """Return the outputs computed in float64, also where the task's source names float32.

        If that fails, for example because an operator has no float64 kernel, return the outputs computed in
        the model's own dtypes. If it fails for lack of memory, the error is raised instead.
        """
        model = copy.deepcopy(self.model).double()
        try:
            with computing_in_float64():
                output = model(*[value.double() if is_float_tensor(value) else value for value in inputs])
        except Exception as error:
            if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
                raise
            output = self.model(*inputs)
        outputs: list[torch.Tensor] = flatten_outputs(output)
        return outputs

    def write_exact(self) -> None:
        """Read parameters and inputs from shared memory, and write the float64 outputs for them there."""
        self.shared.load_parameters(self.model)
        arguments = self.shared.arguments(0)
        copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
        with torch.no_grad():
            outputs = self.float64_outputs(copies)
        for value, slot in zip(outputs, self.shared.tensors("expected"), strict=True):
            slot.copy_(value)

    def fill(self, order: dict[str, Any]) -> None:
        """Write the inputs of one input set to shared memory, with its outputs if the order asks for them.

        The order contains `set` (number of the input set), `seed`, `distribution`, `parameters` (a seed, or
        None for the initial parameters), `outputs` (whether to write the model's outputs) and `exact`
        (whether to write float64 outputs). To check whether a task depends on all of its inputs and
        parameters, the order may name one input (`other_input`, by position) or one parameter
        (`other_parameter`) that is drawn with another seed.
        """
        state = self.parameters(order["parameters"]) if order["parameters"] is not None else self.initial
        if name := order.get("other_parameter"):
            state = state | {name: self.parameters(order["parameters"] ^ 1, name)[name]}
        inputs = self.inputs(order["seed"], order["distribution"])
        if (position := order.get("other_input")) is not None:
            inputs[position] = self.inputs(order["seed"] ^ 1, order["distribution"])[position]
        self.model.load_state_dict(state)
        slots = iter(self.shared.tensors("inputs", order["set"]))
        written = [next(slots).copy_(value) if isinstance(value, torch.Tensor) else value for value in inputs]
        results = {}
        with torch.no_grad():
            if order["outputs"]:  # the model may change its inputs in place
                results["outputs"] = flatten_outputs(self.model(*inputs))
            if order["exact"]:
                copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in written]
                results["expected"] = self.float64_outputs(copies)
        for region, values in results.items():
            for value, slot in zip(values, self.shared.tensors(region, order["set"]), strict=True):
                slot.copy_(value)

    def write_parameters(self, seed: int) -> None:
        """Write the random parameters for a seed to shared memory."""
        for value, slot in zip(
            self.parameters(seed).values(), self.shared.tensors("parameters"), strict=True
        ):
            slot.copy_(value)


def is_float_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
