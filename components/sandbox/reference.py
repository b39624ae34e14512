"""Inputs, parameters and expected outputs, made by the task's own source, which is as untrusted as a candidate's.

This file runs inside the sandbox only; the judge never imports it.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
import types
from typing import Any

import torch
from input_distributions import INPUT_DISTRIBUTIONS
from runner_support import Shared, eval_mode, flat, module_of


def describe(code: str, device: str) -> dict:
    """What the judge must know to lay out memory: shapes, dtypes, names; numbers and short strings only."""
    module = module_of("model", code)
    torch.manual_seed(0)
    init_inputs = module.get_init_inputs()
    json.dumps(init_inputs)
    model = eval_mode(module.Model(*init_inputs), device)
    inputs = made_inputs(module, device)
    moved = [v.to(device) if isinstance(v, torch.Tensor) else v for v in inputs]
    with torch.no_grad():
        outputs = flat(model(*moved))
        seconds, end = math.inf, time.perf_counter() + 0.02
        while seconds == math.inf or time.perf_counter() < end:
            start = time.perf_counter()
            outputs = flat(model(*moved))
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = min(seconds, time.perf_counter() - start)

    def form(t: torch.Tensor) -> list:
        return [list(t.shape), str(t.dtype).removeprefix("torch.")]

    return {
        "init_inputs": init_inputs,
        "inputs": [form(v) if isinstance(v, torch.Tensor) else None for v in inputs],
        "scalars": [None if isinstance(v, torch.Tensor) else [v] for v in inputs],
        "outputs": [form(t) for t in outputs],
        "state": [[name, *form(t)] for name, t in model.state_dict().items()],
        "parameters": [name for name, _ in model.named_parameters()],
        "seconds": seconds,  # a hint for how many calls fill a round; no result rests on it
        "peak_bytes": torch.cuda.max_memory_reserved()
        if device == "cuda"
        else 0,  # a hint for how many tasks fit side by side
    }


def made_inputs(module: types.ModuleType, device: str) -> list[Any]:
    """`get_inputs()`, on a GPU by that GPU where the source lets it: one core needs half a second for 2^26 random numbers."""
    if device == "cuda":
        try:
            with torch.device(device):
                return list(module.get_inputs())
        except RuntimeError:  # it mixes what it makes with tensors of the host
            pass
    return list(module.get_inputs())


class Oracle:
    """Inputs, parameters and expected outputs of a task, made by its own source under the judge's secret seeds."""

    def __init__(self, header: dict, shared: Shared):
        self.shared = shared
        self.module = sys.modules.get("model") or module_of("model", header["code"])
        torch.manual_seed(0)
        self.model = eval_mode(self.module.Model(*header["init_inputs"]), shared.device)
        self.default = {k: v.clone() for k, v in self.model.state_dict().items()}
        self.drawn: tuple[tuple[int, str | None], dict[str, torch.Tensor]] = ((-1, None), {})

    def parameters(self, seed: int, only: str | None = None) -> dict[str, torch.Tensor]:
        """Random parameters: no scale is 1 and no bias is 0, so that a candidate that ignores them is wrong."""
        if (seed, only) == self.drawn[0]:  # sets share them
            return self.drawn[1]
        device = self.shared.device
        generator = torch.Generator(device).manual_seed(seed)
        state = {}
        for name, value in self.default.items():
            if not value.is_floating_point() or (only is not None and name != only):
                state[name] = value
                continue
            noise = torch.randn(value.shape, generator=generator, device=device).to(value)
            factor = (torch.rand(value.shape, generator=generator, device=device) + 0.5).to(value)
            positive = name.endswith("running_var")
            state[name] = factor if positive else value * factor + (0.1 * noise if value.dim() < 2 else 0)
        self.drawn = ((seed, only), state)
        return state

    def inputs(self, seed: int, distribution: str) -> list[Any]:
        torch.manual_seed(seed)
        values = made_inputs(self.module, self.shared.device)
        moved = [v.to(self.shared.device) if isinstance(v, torch.Tensor) else v for v in values]
        return [
            INPUT_DISTRIBUTIONS[distribution](v).contiguous()
            if isinstance(v, torch.Tensor) and v.is_floating_point()
            else v
            for v in moved
        ]

    def exactly(self, inputs: list[Any]) -> list[torch.Tensor]:
        """The outputs in float64, where the task's source allows it."""
        wide = copy.deepcopy(self.model).double()
        try:
            return flat(
                wide(
                    *[
                        v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
                        for v in inputs
                    ]
                )
            )
        except RuntimeError:  # the source fixes float32 somewhere: its own result is the reference then
            return flat(self.model(*inputs))

    def fill(self, order: dict) -> None:
        """Fill one set: inputs, float32 outputs, and where the order says `exact` float64 ones. The variations serve admission (DESIGN §5)."""
        state = self.parameters(order["parameters"]) if order["parameters"] is not None else self.default
        if order.get("other_parameter"):
            state = state | {
                order["other_parameter"]: self.parameters(order["parameters"] ^ 1, order["other_parameter"])[
                    order["other_parameter"]
                ]
            }
        inputs = self.inputs(order["seed"], order["distribution"])
        if order.get("other_input") is not None:
            inputs[order["other_input"]] = self.inputs(order["seed"] ^ 1, order["distribution"])[
                order["other_input"]
            ]
        index = order["set"]
        self.model.load_state_dict(state)
        slots = iter(self.shared.tensors("inputs", index))
        kept = [next(slots).copy_(v) if isinstance(v, torch.Tensor) else v for v in inputs]
        with torch.no_grad():
            found = (
                {"outputs": flat(self.model(*inputs))} if order["outputs"] else {}
            )  # which may change them in place
            if order["exact"]:
                found["expected"] = self.exactly(
                    [v.clone() if isinstance(v, torch.Tensor) else v for v in kept]
                )
        for name, values in found.items():
            for value, slot in zip(values, self.shared.tensors(name, index), strict=True):
                slot.copy_(value)

    def write_parameters(self, seed: int) -> None:
        for value, slot in zip(
            self.parameters(seed).values(), self.shared.tensors("parameters"), strict=True
        ):
            slot.copy_(value)
