"""Memory that the judge's own computations take beside the tensors of a large task."""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from components.core.config import resolve
from components.core.errors import TaskError
from components.judge import compile_cache, correctness, input_mixing, timed_output_check
from components.judge.correctness import ReferenceOutput
from components.judge.input_mixing import InputBank
from components.judge.memory_plan import COMPARING_BYTES
from components.judge.task_bench import BenchCache, TaskBench
from components.judge.timed_output_check import departures
from components.sandbox.inside.input_distributions import INPUT_DISTRIBUTIONS

BASE = resolve().params
PART = 1 << 16
ALLOWED = COMPARING_BYTES // correctness.PART_NUMEL * PART
NUMEL = 16 * PART


class LargestUse(TorchDispatchMode):
    """Count the bytes of all storages that operators make in the context, and keep the largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.largest = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.note((args, kwargs), made=False)
        result = func(*args, **(kwargs or {}))
        self.note(result, made=True)
        return result

    def note(self, values: Any, *, made: bool) -> None:
        for leaf in tree_leaves(values):
            if not isinstance(leaf, torch.Tensor) or leaf.untyped_storage()._cdata in self.known:
                continue
            storage = leaf.untyped_storage()
            size = storage.nbytes() if made else 0
            self.known.add(storage._cdata)
            self.live += size
            self.largest = max(self.largest, self.live)
            weakref.finalize(storage, self.forget, storage._cdata, size)

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "PART_NUMEL", PART)
    monkeypatch.setattr(timed_output_check, "PART_NUMEL", PART)
    monkeypatch.setattr(timed_output_check, "COMPARED_BYTES", PART)
    monkeypatch.setattr(input_mixing, "BLOCK_NUMEL", PART)


def outputs(is_finite: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an output in float64, in `dtype`, and another one that differs a little from the second."""
    exact = torch.randn(NUMEL // 256, 256, dtype=torch.float64)
    if not is_finite:
        exact.view(-1)[::3] = float("inf")
    return exact, exact.to(dtype), (exact * (1 + 1e-7)).to(dtype)


def test_the_counter_sees_a_copy() -> None:
    values = torch.zeros(NUMEL)
    with LargestUse() as use:
        values.double().float()
    assert use.largest == 12 * NUMEL and use.live == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("is_finite", [True, False], ids=["finite", "infinite"])
def test_comparing_an_output_takes_the_memory_of_parts(is_finite: bool, dtype: torch.dtype) -> None:
    exact, single, output = outputs(is_finite, dtype)
    with LargestUse() as use:
        reference = ReferenceOutput(single, exact, BASE.sandbox, BASE.precision, keep_parts=False)
        for loose in (0.0, 1.0):
            reference.mismatch(output, loose=loose)
        reference.is_repeated_by(output)
        departures(output.view(1, -1), single.view(1, -1))
    assert PART < use.largest <= ALLOWED < NUMEL * dtype.itemsize * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_mixing_inputs_takes_the_memory_of_blocks(dtype: torch.dtype) -> None:
    sets = [[torch.randn(NUMEL // 256, 256).to(dtype)] for _ in range(3)]
    out = torch.empty(NUMEL, dtype=dtype)
    bank = InputBank(sets, ["given"], "cpu", may_double=False)
    with LargestUse() as use:
        for name in INPUT_DISTRIBUTIONS:
            bank.write(bank.fresh(1)[0]._replace(distribution=name), 0, out)
    assert PART < use.largest <= ALLOWED


@pytest.mark.parametrize("name", INPUT_DISTRIBUTIONS)
def test_a_distribution_is_the_same_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [[torch.randn(3001)] for _ in range(3)]
    bank = InputBank(sets, ["given"], "cpu", may_double=False)
    out = torch.empty(3001)
    for block in (100, 1000, 10**6):
        monkeypatch.setattr(input_mixing, "BLOCK_NUMEL", block)
        bank.write(bank.original(0)._replace(distribution=name), 0, out)
        assert torch.equal(out, INPUT_DISTRIBUTIONS[name](sets[0][0])), block


def test_departures_of_infinite_outputs_do_not_depend_on_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    single, other = torch.randn(1, 1000), torch.randn(1, 1000)
    single[0, 100:300] = float("inf")
    cases = {
        "close": single * (1 + 1e-5),
        "finite where it is not": torch.where(torch.isfinite(single), single, other),
        "NaN": single.index_fill(1, torch.tensor([5, 700]), float("nan")),
        "never finite": torch.full_like(single, float("nan")),
    }
    for name, output in cases.items():
        found = []
        for part in (64, 100, 1 << 20):
            monkeypatch.setattr(timed_output_check, "PART_NUMEL", part)
            found.append(departures(output, single).item())
        assert all(abs(a / b - 1) < 1e-6 for a, b in itertools.pairwise(found)) and found[0] > 1, name


def test_a_task_that_fails_leaves_nothing_in_the_cache_of_benches() -> None:
    """Callers of a service may send any number of such tasks."""
    cache = BenchCache(2)

    def fail() -> TaskBench:
        raise TaskError("it has no inputs")

    for number in range(100):
        with pytest.raises(TaskError), cache.use(str(number), fail):
            pass
    assert not cache.users and not cache.task_locks and not cache.benches


def test_benches_that_are_closed_together_are_closed_once_each() -> None:
    cache, closed = BenchCache(4), list[int]()

    def bench(number: int) -> Any:
        def close() -> None:
            cache.close_unused()  # as another thread, which waits for memory
            closed.append(number)

        return SimpleNamespace(close=close)

    for number in range(4):
        with cache.use(str(number), partial(bench, number)):
            pass
    cache.close()
    assert sorted(closed) == [0, 1, 2, 3]


def test_the_memory_of_a_process_that_compiles_is_reserved_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[object] = []

    @contextlib.contextmanager
    def reserve_memory(size: int) -> Iterator[None]:
        events.append(size)
        yield
        events.append("free")

    runner = SimpleNamespace(receive=bytes, close=lambda wait=False: events.append(("closed", wait)))
    reference: Any = SimpleNamespace(
        bytes=1 << 40,
        code="",
        layout=SimpleNamespace(description=SimpleNamespace(init_inputs=[], peak_bytes=1 << 30)),
        params=BASE,
        processes=SimpleNamespace(start=lambda *_, **__: runner),
        scheduler=SimpleNamespace(
            reservable_bytes=1 << 40,
            reserve_memory=reserve_memory,
            background_work=contextlib.nullcontext,
        ),
    )
    monkeypatch.setattr(compile_cache, "has_artefacts", lambda *_: False)
    compile_cache.compile_large(reference)
    assert events == [compile_cache.CONTEXT_BYTES + (2 << 30), ("closed", True), "free"]
