"""Run a task's own source for the judge, in the roles `describe` and `reference` of a runner.

A task is a PyTorch module that is to be made faster, with functions that make its inputs. A runner is a
sandboxed process, and a role is what it executes. In the role `describe` a runner reports the task's shapes,
dtypes and names. In the role `reference` it writes inputs, parameters and expected outputs to shared memory.
The source is untrusted, so this file runs only inside the sandbox; the judge never imports it.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import sys
import time
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from input_distributions import INPUT_DISTRIBUTIONS
from operator_modes import HALF_DTYPES, OperationCounter, computing_in_float64
from runner_support import SharedTensors, construct, define_module, eval_mode, flatten_outputs, plain
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from components.sandbox.inside.runner_protocol import RegionName, RoleHeader

# `describe` repeats the model's call for so many seconds of CPU time, but at most for so many of wall time,
# and takes the fastest call. The judge may stop the process in a call, which then looks slow. CPU time does
# not pass while the process is stopped, so that other calls follow.
TIMING_SECONDS, MOST_TIMING_SECONDS = 0.02, 1.0
# Largest number of bytes of GPU memory that torch may cache between the calls in two precisions.
MAX_CACHED_BYTES = 1 << 30


def describe(code: str, device: str) -> dict[str, Any]:
    """Return the shapes, dtypes, names and costs of a task, from which the judge lays out shared memory.

    `code` is the source of the task, a PyTorch module that is to be made faster. `inputs` and `outputs` of
    the result have a (shape, dtype) pair for each tensor, and `state` has (name, shape, dtype) for each entry
    of the model's state dict. For an argument of a call that is no tensor, `inputs` has None and `scalars`
    has `[value]`; for a tensor, `scalars` has None. `parameters` has the names of the parameters, and
    `init_inputs` the arguments of the model's constructor. `seconds` is the duration of the fastest call,
    `peak_bytes` the GPU memory that torch reserved at most (0 on cpu), and `operations` the floating-point
    operations of one call that torch counts. JSON can represent all values. Raises TypeError if the task has
    values that the judge cannot hand to a candidate (an implementation of a PyTorch module, to be judged) or
    compare, or if the constructor raises anything but a MemoryError or RuntimeError. Other errors of the
    source are raised as they are.
    """
    module = define_module("model", code)
    torch.manual_seed(0)
    init_inputs = module.get_init_inputs()
    if not isinstance(init_inputs, list | tuple):
        raise TypeError(
            f"get_init_inputs() returns a {type(init_inputs).__name__}; let it return the list of the "
            "positional arguments of Model"
        )
    plain_init_inputs = [plain(value, "get_init_inputs()") for value in init_inputs]
    try:
        model = eval_mode(module.Model(*init_inputs), device)
    except (MemoryError, RuntimeError):  # also a device without memory, for which the judge tries again
        raise
    except Exception as error:
        raise TypeError(
            f"Model(*get_init_inputs()) raises {type(error).__name__}: {error}. get_init_inputs() has to "
            f"return the list of the positional arguments of Model, and returns {repr(init_inputs)[:200]}"
        ) from error
    inputs = make_inputs(module, device)
    arguments = [value.to(device) if isinstance(value, torch.Tensor) else value for value in inputs]

    def form(tensor: torch.Tensor) -> tuple[list[int], str]:
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(
                f"the task has a {kind} among its inputs, outputs or parameters; only dense tensors, and "
                "tuples and lists of them as outputs, can be compared"
            )
        return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    with torch.no_grad():
        outputs = [form(tensor) for tensor in flatten_outputs(model(*arguments))]
        seconds, begin, cpu_begin = math.inf, time.perf_counter(), time.process_time()
        while seconds == math.inf or (
            time.process_time() < cpu_begin + TIMING_SECONDS
            and time.perf_counter() < begin + MOST_TIMING_SECONDS
        ):
            start = time.perf_counter()
            model(*arguments)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = min(seconds, time.perf_counter() - start)
        counter = OperationCounter()
        with contextlib.suppress(Exception), counter:  # of a module that the counter cannot follow
            model(*arguments)

    return {
        "init_inputs": plain_init_inputs,
        "inputs": [form(value) if isinstance(value, torch.Tensor) else None for value in inputs],
        "scalars": [
            None if isinstance(value, torch.Tensor) else [plain(value, "get_inputs()")] for value in inputs
        ],
        "outputs": outputs,
        "state": [(name, *form(tensor)) for name, tensor in model.state_dict().items()],
        "parameters": [name for name, _ in model.named_parameters()],
        # The judge only chooses the number of calls in a round and of simultaneous tasks according to these
        # two values; no result depends on them.
        "seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else 0,
        "operations": counter.total,
    }


def make_inputs(module: types.ModuleType, device: str) -> list[Any]:
    """Return the arguments of one call, which the task's function `get_inputs()` makes, as a list.

    `module` is the source of the task, a PyTorch module that is to be made faster. With `device` "cuda" the
    function is called with the GPU as torch's default device, because one CPU core is slow at making large
    random tensors. If it then raises RuntimeError, for example because it combines these tensors with others
    in host memory, it is called again without a default device. Raises TypeError if it returns neither a list
    nor a tuple.
    """
    values = None
    if device == "cuda":
        with contextlib.suppress(RuntimeError), torch.device(device):  # it may combine them with host memory
            values = module.get_inputs()
    if values is None:
        values = module.get_inputs()
    if not isinstance(values, list | tuple):
        raise TypeError(
            f"get_inputs() returns a {type(values).__name__}; let it return the list of the arguments of "
            "forward"
        )
    return list(values)


def _copied(slot: torch.Tensor, value: torch.Tensor, kind: str) -> torch.Tensor:
    """Copy `value` to `slot`, which has the shape of the same tensor in an earlier call, and return `slot`.

    Raises ValueError, whose text calls the tensor `kind` (such as `an input`), if the shapes differ.
    """
    if value.shape != slot.shape:
        raise ValueError(
            f"{kind} has the shape {list(slot.shape)} in one call and {list(value.shape)} in another; only "
            "shapes that depend neither on the values of the inputs nor on the seed can be judged"
        )
    return slot.copy_(value)


class ReferenceModel:
    """A task's own model, which makes parameters, inputs and expected outputs from the judge's seeds.

    A task is a PyTorch module that is to be made faster. The judge keeps the seeds secret from candidates,
    which are implementations of this module, to be judged. `header` is the message that gives this process
    the role `reference`, with the task's source, and `shared` is the memory that the results are written to.
    The constructor raises any error of the task's source.
    """

    def __init__(self, header: RoleHeader, shared: SharedTensors):
        self.shared = shared
        self.module = sys.modules.get("model") or define_module("model", header["code"])
        torch.manual_seed(0)
        self.model = eval_mode(construct(self.module.Model, header), shared.device)
        self.initial = {name: value.clone() for name, value in self.model.state_dict().items()}
        # Arguments of the last call of `load`, because most input sets have the same parameters.
        self.loaded: tuple[int | None, str | None] = (None, None)

    def parameters(self, seed: int | None, only: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the value of each entry of the model's state dict, drawn with `seed`.

        Floating-point and complex values are multiplied by random factors from 0.5 to 1.5; those with fewer
        than two dimensions also get normal noise with the standard deviation 0.1, and a `running_var` is
        replaced by the factors. So scales differ from 1 and biases from 0, and an implementation that ignores
        them is wrong. Integers are shuffled unless they are sorted, as positions are, and booleans stay as
        they are. If `seed` is None, all values are the initial ones. If `only` is given, only the tensor of
        that name is yielded, with other values than without `only`, because its random numbers are then the
        first that are drawn.
        """
        device = self.shared.device
        generator = torch.Generator(device).manual_seed(seed or 0)
        for name in self.initial if only is None else (only,):
            value = self.initial[name]
            if seed is None or value.dtype == torch.bool:
                yield name, value
            elif not (value.is_floating_point() or value.is_complex()):
                yield name, _shuffled(value, generator)
            else:
                dtype = value.dtype if value.is_complex() else None
                noise = torch.randn(value.shape, generator=generator, device=device, dtype=dtype).to(value)
                factor = (torch.rand(value.shape, generator=generator, device=device) + 0.5).to(value)
                positive = name.endswith("running_var")
                yield name, factor if positive else value * factor + (0.1 * noise if value.dim() < 2 else 0)

    def load(self, seed: int | None, other: str | None) -> None:
        """Load the parameters that are drawn with `seed` into the model, or the initial ones for None.

        If `other` is the name of a parameter and `seed` is not None, this parameter is drawn with another
        seed. Nothing happens if the last call had the same arguments.
        """
        if (seed, other) == self.loaded:
            return
        state = self.model.state_dict()
        for name, value in self.parameters(seed):
            state[name].copy_(value)
        if seed is not None and other is not None:
            for name, value in self.parameters(seed ^ 1, other):
                state[name].copy_(value)
        self.loaded = seed, other

    def inputs(self, order: dict[str, Any], seed: int) -> list[Any]:
        """Return the arguments of one call, which the task's `get_inputs` draws with `seed`, after a change.

        A task is the source of a PyTorch module that is to be made faster. `order` is a message of the judge.
        Its `distribution` is the name of the change (a key of `INPUT_DISTRIBUTIONS`, such as `scaled`). Its
        `changed` has the positions of the tensors that are changed, counted among the arguments that are
        tensors; without it none is changed.
        """
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        change, changed = INPUT_DISTRIBUTIONS[order["distribution"]], order.get("changed", ())
        inputs, position = [], 0
        for value in make_inputs(self.module, self.shared.device):
            if isinstance(value, torch.Tensor):
                moved = value.to(self.shared.device)
                value = (change(moved) if position in changed else moved).contiguous()
                position += 1
            inputs.append(value)
        return inputs

    def float64_outputs(self, values: list[Any]) -> Any:
        """Return the model's output for the arguments `values`, computed in float64.

        float64 replaces float32 even where the source of the model names float32. If the model has an input
        or a parameter in half precision and none in float32, float64 replaces half precision in the same way.
        `values` are not changed. If the computation fails, for example because an operator has no float64
        kernel, return the output computed in the model's own dtypes. Raises RuntimeError if an output is then
        in half precision, because nothing would be known of its rounding, and the error itself if memory is
        lacking.
        """
        used = {t.dtype for t in (*values, *self.initial.values()) if isinstance(t, torch.Tensor)}
        halves = [dtype for dtype in HALF_DTYPES if dtype in used and torch.float32 not in used]
        written_for = halves[0] if halves else torch.float32
        model = copy.deepcopy(self.model).double()
        try:
            with computing_in_float64(written_for):
                return model(*self._copies(values, in_float64=True))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            outputs = self.model(*self._copies(values, in_float64=False))
            if any(t.dtype in HALF_DTYPES for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)):
                raise RuntimeError(
                    "a module with outputs in half precision must run in float64 too, with which they are "
                    f"compared: {type(error).__name__}: {error}"
                ) from error
            return outputs

    def _copies(self, values: list[Any], *, in_float64: bool) -> list[Any]:
        """Return `values` with copies of the tensors on the device, because a model may change them.

        With `in_float64`, the copies of floating-point tensors have the dtype float64.
        """
        device = self.shared.device
        return [
            value.to(
                device, torch.float64 if in_float64 and value.is_floating_point() else value.dtype, copy=True
            )
            if isinstance(value, torch.Tensor)
            else value
            for value in values
        ]

    def write_exact(self) -> None:
        """Compute float64 outputs for input set 0, and write them to shared memory.

        The inputs of this set (the tensors of one call) and the parameters are read from shared memory. The
        outputs are written to set 0 of the region `expected`. Raises ValueError if their shapes differ from
        those there.
        """
        self.shared.load_parameters(self.model)
        with torch.no_grad():
            self._write("expected", 0, self.float64_outputs(self.shared.arguments(0)))

    def fill(self, order: dict[str, Any]) -> None:
        """Write the inputs of one input set to shared memory, and the outputs that `order` selects.

        An input set is the tensors of one call, and `order` a message of the judge. It contains `set` (number
        of the input set), `seed`, `distribution` and `changed` (how the drawn inputs are changed, and which),
        `parameters` (a seed, or None for the initial parameters), `outputs` (whether to write the model's
        outputs), `exact` (whether to write float64 outputs) and `optional` (whether the caller of this method
        reports a failure of the task's source and goes on, in place of ending the process). A task is a
        PyTorch module that is to be made faster. To check whether it depends on all of its inputs and
        parameters, the order may name one input (`other_input`, its position among all arguments) or one
        parameter (`other_parameter`) that is drawn with another seed. Raises ValueError if a tensor's shape
        differs from that in shared memory, and any error of the task's source.
        """
        if order["outputs"] or order["exact"]:
            self.load(order["parameters"], order.get("other_parameter"))
        inputs = self.inputs(order, order["seed"])
        if (position := order.get("other_input")) is not None:
            inputs[position] = self.inputs(order, order["seed"] ^ 1)[position]
        slots = iter(self.shared.tensors("inputs", order["set"]))
        written = [
            _copied(next(slots), value, "an input") if isinstance(value, torch.Tensor) else value
            for value in inputs
        ]
        with torch.no_grad():
            if order["outputs"]:  # the model may change its inputs in place
                self._write("outputs", order["set"], self.model(*inputs))
            if order["exact"]:
                inputs = []  # frees memory
                self._release_cache()
                self._write("expected", order["set"], self.float64_outputs(written))
                self._release_cache()

    def _release_cache(self) -> None:
        """Return torch's cached GPU memory to the device if it has more than MAX_CACHED_BYTES.

        Tensors in float64 seldom fit into blocks that were cached for other tensors, and the reverse.
        """
        # Both counts are 0 on cpu.
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > MAX_CACHED_BYTES:
            torch.cuda.empty_cache()

    def _write(self, region: RegionName, index: int, outputs: Any) -> None:
        """Write the outputs of one call to set `index` of `region`, which is `outputs` or `expected`.

        The region `expected` is for float64 outputs. Raises ValueError if their number or a shape differs
        from that in shared memory.
        """
        for value, slot in zip(flatten_outputs(outputs), self.shared.tensors(region, index), strict=True):
            _copied(slot, value, "an output")

    def write_parameters(self, seed: int | None) -> None:
        """Write the parameters that are drawn with `seed`, or the initial ones for None, to shared memory."""
        for (_, value), slot in zip(self.parameters(seed), self.shared.tensors("parameters"), strict=True):
            slot.copy_(value)


def _shuffled(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return `value`, a tensor of integers, with its elements in an order that `generator` draws.

    If its elements, flattened, are sorted in ascending order, return the tensor itself.
    """
    flat = value.flatten()
    if bool((flat[1:] >= flat[:-1]).all()):
        return value
    order = torch.randperm(flat.numel(), generator=generator, device=flat.device)
    return flat[order].view(value.shape)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that torch or Python could not allocate memory on the host or on a GPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
