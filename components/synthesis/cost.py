"""The cost of an operator: the floating-point operations, bytes and kernel launches of one eager call.

The cost is computed on meta tensors, without executing the operator.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from components.core.param_types import Device
from components.synthesis.core_operators import CORE_OPERATORS, canonical
from components.synthesis.mined_operators import OperatorTemplate, output_layout

# Names of the torch operators that only make a view.
VIEWS = frozenset(
    (
        "view _unsafe_view reshape expand permute transpose t unsqueeze squeeze select slice "
        "alias detach as_strided split unbind"
    ).split()
)
# Eager nanoseconds for one element on one CPU core, by the canonical name of the operator.
NANOSECONDS = {canonical(f"F.{seed.name}"): seed.cost for seed in CORE_OPERATORS}
# Nanoseconds for one element that are assumed for every other operator.
OTHER_NANOSECONDS = 0.5
# Approximate number of floating-point operations per second of one CPU core.
CPU_FLOPS = 4e10
# Approximate FLOP/s, memory bandwidth in bytes/s, and seconds of one kernel launch of a GPU.
GPU_FLOPS, GPU_BANDWIDTH, GPU_LAUNCH = 4e13, 3e12, 4e-6


@dataclass
class OperatorCost:
    """The cost of an operator template (OperatorTemplate) on one input.

    `flops` is the number of floating-point operations of products and convolutions. `bytes` is the number of
    bytes of the inputs and outputs of all kernels. `calls` is the number of kernel launches, `largest` is the
    number of bytes of the largest tensor, including parameters, and `after` is the shape and the strides of
    the output.
    """

    flops: int = 0
    bytes: int = 0
    calls: int = 0
    largest: int = 0
    after: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


class Meter(TorchDispatchMode):
    """A context manager that adds the cost of the torch operators that its block calls to `cost`.

    The tensors may be meta tensors. Operators that only make a view cost nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cost = OperatorCost()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in VIEWS:
            sizes = [t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
            self.cost.calls += 1
            self.cost.bytes += sum(sizes)
            self.cost.largest = max(self.cost.largest, *sizes, 0)
            counter = flop_registry.get(func.overloadpacket)
            self.cost.flops += counter(*args, **(kwargs or {}), out_val=out) if counter is not None else 0
        return out


@functools.lru_cache(maxsize=65536)
def operator_cost(
    template: OperatorTemplate, shape: tuple[int, ...], stride: tuple[int, ...]
) -> OperatorCost | None:
    """Return the cost of a template on a float32 input with this shape and strides.

    The result is None if the template cannot be applied to such an input (`output_layout`).
    """
    with Meter() as meter:
        after = output_layout.__wrapped__(template, shape, stride)
    return None if after is None else replace(meter.cost, after=after)


def estimate_operator_seconds(
    template: OperatorTemplate, cost: OperatorCost, device: Device
) -> tuple[float, float]:
    """Estimate the eager seconds of an operator: those that do not depend on the input's size, and the rest.

    `cost` is the cost of the template on one input, and the second number holds for the size of that input.
    The estimate is used to choose a size. On a GPU, the fixed part is the time of the kernel launches, which
    is nearly the whole time for a small input. On a CPU, the fixed part is 0.
    """
    if device == "cuda":
        return cost.calls * GPU_LAUNCH, cost.flops / GPU_FLOPS + cost.bytes / GPU_BANDWIDTH
    return 0.0, cost.flops / CPU_FLOPS + cost.bytes / 8e9 * NANOSECONDS.get(
        template.operator, OTHER_NANOSECONDS
    )
