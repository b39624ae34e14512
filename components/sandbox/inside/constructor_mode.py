"""Construct a candidate while torch's compute operators are blocked, with results recorded elsewhere.

A candidate is an implementation of a PyTorch module, to be judged. In the process in which it is measured,
operators that allocate, view, copy, fill or draw random numbers run as usual in a constructor. None of them
does arithmetic with the values of tensors, so a candidate cannot use them to compute an output. A constructor
may need another operator, as for the product in `torch.randn(8, 8) * 0.02`. Such a constructor is run
beforehand in a second process, where torch computes and nothing is measured. That process records the results
of such operators, and in the measured process the constructor gets the recorded results.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that a constructor may call besides those that are always allowed, by name without overload.
CONSTRUCTION_OPERATORS = frozenset(
    """
    arange eye full full_like linspace logspace ones ones_like scalar_tensor tril_indices triu_indices
    rand rand_like randint randint_like randn randn_like randperm empty_permuted
    uniform_ normal_ random_ exponential_ log_normal_ cauchy_ geometric_
    _to_copy diagonal unfold split_with_sizes set_ resize_ _cudnn_rnn_flatten_weight""".split()
)
# Overloads that draw with parameters that are numbers. Other overloads of these operators draw with
# parameters from tensors, and thereby compute.
FILLS_WITH_FLOATS = frozenset(["normal.float_float", "normal.float_float_out", "bernoulli_.float"])


def may_construct(name: str) -> bool:
    """Return whether a candidate's constructor may call the operator `name`, such as "normal.float_float".

    A candidate is an implementation of a PyTorch module, to be judged. The result is False for operators that
    every call may use (`operator_blocking.ALLOWED_OPERATORS`), although a constructor may call these too.
    """
    return name.split(".")[0] in CONSTRUCTION_OPERATORS or name in FILLS_WITH_FLOATS


class UnknownResult(BaseException):
    """Error raised if a candidate's constructor calls an operator whose result has not been recorded.

    A candidate is an implementation of a PyTorch module, to be judged. The error is a BaseException, so that
    a constructor that catches Exception does not continue without the result.
    """


class ConstructorMode(TorchDispatchMode):
    """Mode that records the results of operators, or returns recorded results in place of calling them.

    `names` are the full names of these operators, such as `aten::mul.Tensor`; others run as usual. If
    `recorded` is None, the operators are called and their results are recorded in the attribute `results`.
    This list has a pair for each call in order: the operator's name, and a list with the operator's output,
    or with the arguments that it wrote. Otherwise `recorded` is such a list that another process recorded for
    the same constructor. Raises UnknownResult if a call is not the next one in `recorded`.
    """

    def __init__(self, names: Collection[str], recorded: list[Any] | None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names
        self.results: list[Any] = []
        self.recorded: Iterator[tuple[str, list[Any]]] | None = None if recorded is None else iter(recorded)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap `__torch_dispatch__` in a function that imports Dynamo.

        The import takes two seconds in each process.
        """
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (name := func.name()) not in self.names:
            return func(*args, **kwargs)
        written = [
            args[i] if i < len(args) else kwargs[argument.name]
            for i, argument in enumerate(func._schema.arguments)
            if argument.is_out or (argument.alias_info is not None and argument.alias_info.is_write)
        ]
        if self.recorded is None:
            output = func(*args, **kwargs)
            self.results.append((name, [copied(value) for value in written or [output]]))
            return output
        recorded_name, values = next(self.recorded, ("", []))
        if recorded_name != name:
            raise UnknownResult(name)
        if not written:
            return values[0]
        for target, value in zip(written, values, strict=True):
            targets, sources = (x if isinstance(x, list) else [x] for x in (target, value))
            for tensor, source in zip(targets, sources, strict=True):
                tensor.resize_(source.shape).copy_(source)
        returns = len(func._schema.returns)
        return written[0] if returns == 1 else tuple(written) if returns else None


def copied(value: Any) -> Any:
    """Return an operator's output with every tensor cloned, so that later writes do not change it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return type(value)(map(copied, value)) if isinstance(value, list | tuple) else value
