"""Inputs, parameters and expected outputs, made by the task's own source, which is untrusted.

This file runs inside the sandbox only; the judge never imports it.
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
from input_distributions import INPUT_DISTRIBUTIONS
from runner_support import SharedTensors, define_module, eval_mode, flatten_outputs

if TYPE_CHECKING:
    from components.sandbox.runner_protocol import RoleHeader

TIMING_SECONDS = 0.02
"""How long `describe` repeats the model's call to time it."""


def describe(code: str, device: str) -> dict[str, Any]:
    """Return what the judge must know to lay out memory: shapes, dtypes and names.

    Numbers and short strings only.
    """
    module = define_module("model", code)
    torch.manual_seed(0)
    init_inputs = module.get_init_inputs()
    json.dumps(init_inputs)  # raises for what is no JSON
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
        # Hints for the number of calls in a round and of tasks side by side; no result depends on them.
        "seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else 0,
    }


def make_inputs(module: types.ModuleType, device: str) -> list[Any]:
    """Return `get_inputs()`, made on the GPU where the source allows it.

    A CPU core is slow for large random tensors.
    """
    if device == "cuda":
        try:
            with torch.device(device):
                return list(module.get_inputs())
        except RuntimeError:  # it combines what it makes with tensors of the host
            pass
    return list(module.get_inputs())


class ReferenceModel:
    """A task's model under the judge's secret seeds.

    Its parameters, its inputs, and the outputs that candidates must match.
    """

    def __init__(self, header: RoleHeader, shared: SharedTensors):
        self.shared = shared
        self.module = sys.modules.get("model") or define_module("model", header["code"])
        torch.manual_seed(0)
        self.model = eval_mode(self.module.Model(*header["init_inputs"]), shared.device)
        self.initial = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.latest: tuple[tuple[int, str | None], dict[str, torch.Tensor]] = ((-1, None), {})
        """Seed, `only` and values of the parameters that were made last: input sets share them."""

    def parameters(self, seed: int, only: str | None = None) -> dict[str, torch.Tensor]:
        """Return random parameters, or just the one named `only` random and the others initial.

        No scale is 1 and no bias is 0, so that a candidate that ignores them is wrong.
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
        """Return the arguments of one call, floating-point tensors changed to the distribution."""
        torch.manual_seed(seed)
        change = INPUT_DISTRIBUTIONS[distribution]
        values = make_inputs(self.module, self.shared.device)
        moved = [
            value.to(self.shared.device) if isinstance(value, torch.Tensor) else value for value in values
        ]
        return [change(value).contiguous() if is_float_tensor(value) else value for value in moved]

    def float64_outputs(self, inputs: list[Any]) -> list[torch.Tensor]:
        """Return the outputs computed in float64; in float32 where the task's source fixes that somewhere."""
        model = copy.deepcopy(self.model).double()
        try:
            output = model(*[value.double() if is_float_tensor(value) else value for value in inputs])
        except RuntimeError:
            output = self.model(*inputs)
        outputs: list[torch.Tensor] = flatten_outputs(output)
        return outputs

    def fill(self, order: dict[str, Any]) -> None:
        """Write one input set: inputs, where `outputs` float32 outputs, and where `exact` float64 ones.

        The order has `set`, `seed`, `distribution`, and `parameters`, a seed or None for the initial ones.
        For admission it may name one input (`other_input`, by position) or one parameter (`other_parameter`)
        that is drawn from another seed.
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
        """Write the parameters of a seed to shared memory."""
        for value, slot in zip(
            self.parameters(seed).values(), self.shared.tensors("parameters"), strict=True
        ):
            slot.copy_(value)


def is_float_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
