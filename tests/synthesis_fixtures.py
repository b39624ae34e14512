"""Admission of our own composed sources in this process, for tests of synthesis: a small real judge, without the sandbox."""

from __future__ import annotations

import copy
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from components.core.config import Params, resolve
from components.judge.judge import Judge
from components.judge.pool import LocalPool
from components.judge.verdict import Admission

CI = ("data.numel=[4096, 65536]", "data.tasks=12", "data.held_out=4", "data.eager_seconds=[1e-9, 10]")


def parameters(*sets: str) -> Params:
    return resolve("ci", (*CI, *sets)).params


class Borrowed(LocalPool):
    """A pool whose judge is the session's, under parameters of its own."""

    def __init__(self, judge: Judge, params: Params, verdicts: Path):
        super().__init__(params, verdicts)
        self.lent = copy.copy(judge)
        self.lent.params = params

    def start(self) -> Judge:
        return self.lent

    def close(self) -> None:
        self.executor.shutdown(wait=True)


class InProcess:
    """Admission of our own composed sources in this process: a small real judge, for tests only. It may finish them in
    any order."""

    def __init__(self, shuffled: bool = False, refuse: str = ""):
        self.executor = ThreadPoolExecutor(3)
        self.delay = random.Random(time.monotonic_ns()) if shuffled else None
        self.refuse = refuse
        self.asked: list[str] = []

    def admit(self, code: str, *, headroom: bool = False) -> Future[Admission]:
        self.asked.append(code)
        return self.executor.submit(self.admission, code)

    def admission(self, code: str, *, headroom: bool = False) -> Admission:
        if self.delay is not None:
            time.sleep(self.delay.random() * 0.05)
        if self.refuse and self.refuse in code:
            return Admission(False, "half_precision_passes", {"detail": "refused by the test"})
        namespace: dict = {}
        exec(code, namespace)
        model, inputs = namespace["Model"](), namespace["get_inputs"]()
        started = time.perf_counter()
        with torch.no_grad():
            first, other = model(*inputs), model(*namespace["get_inputs"]())
        if torch.equal(first, other):
            return Admission(False, "seeds_agree", {})
        seconds = time.perf_counter() - started
        forms = [{"shape": list(x.shape), "dtype": "float32"} for x in inputs]
        return Admission(
            True,
            "",
            {
                "inputs": forms,
                "outputs": [],
                "parameters": list(model.state_dict()),
                "eager_seconds": seconds,
            },
        )


class Unwalled(LocalPool):
    """The real pool with its journal; what it asks is `InProcess`."""

    def start(self) -> Any:
        asked = InProcess()
        return SimpleNamespace(admit=asked.admission, close=asked.executor.shutdown)
