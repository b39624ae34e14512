"""Headroom: how far torch.compile stands above what the device could reach at all (DESIGN §6).

    headroom = compile seconds / max(compulsory bytes / bandwidth, operations / rate)

Compulsory bytes are inputs, parameters and outputs, each once; operations are counted on meta tensors where a chain was
composed here, and are unknown for sources of others, whose headroom is then an upper bound. Bandwidth and rate are
measured on the present device. A working set that fits a cache can beat the floor: a headroom below 1 is possible.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from components.config import Device, Params
from components.files import digest_bytes, digest_json, read_json, write_json
from components.sandbox.baselines import Bench, TaskFault
from components.sandbox.buffers import layout
from components.sandbox.judge import Admission
from components.sandbox.nursery import InfrastructureError
from components.sandbox.pool import LocalPool
from components.sandbox.timing import net
from components.task import KernelTask

ROUNDS = 3
COPIED_BYTES = 2**27
MATRIX = {"cpu": 1024, "cuda": 8192}
LIKED = 4
"""How often the tasks with the most headroom come in one pass of training."""


@dataclass(frozen=True)
class Rates:
    """What the device can do: bytes a second of a copy, counted once read and once written, and operations a second of a
    float32 matrix product."""

    bandwidth: float
    flops: float


def measure_rates(device: Device) -> Rates:
    """On an idle device; on cpu of one thread, as the judge measures. A second at most."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source = torch.ones(COPIED_BYTES // 4, device=device)
        target = torch.empty_like(source)
        side = MATRIX[device]
        a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
        return Rates(2 * COPIED_BYTES / _seconds(lambda: target.copy_(source), device), 2 * side**3 / _seconds(lambda: torch.mm(a, b), device))
    finally:
        torch.set_num_threads(threads)


def _seconds(work: Callable[[], Any], device: Device) -> float:
    times = []
    for _ in range(6):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


class HeadroomPool:
    """A pool whose admissions say how long torch.compile takes too; a task that it cannot compile is not admitted.

    Measured once: what is known is read back from the pool's journal."""

    def __init__(self, pool: LocalPool, params: Params):
        self.pool, self.params = pool, params
        self.executor = ThreadPoolExecutor(params.sandbox.build_workers, thread_name_prefix="headroom")
        place = self._path(["rates", params.device])
        if not place.is_file():
            write_json(place, asdict(measure_rates(params.device)))
        self.rates = Rates(**read_json(place))

    def admit(self, code: str) -> Future[Admission]:
        return self.executor.submit(self._admit, code)

    def close(self) -> None:
        self.executor.shutdown(wait=True, cancel_futures=True)
        self.pool.close()

    def _admit(self, code: str) -> Admission:
        admission = self.pool.admit(code).result()
        if not admission.admitted:
            return admission
        place = self._path(["headroom", self.pool.protocol, digest_bytes(code.encode())])
        if not place.is_file():
            try:
                found: dict[str, Any] = self._compiled(code)
            except TaskFault as error:
                found = {"fault": str(error)[:300]}
            except InfrastructureError as error:
                return Admission(False, "infrastructure", {"detail": str(error)[:300]})
            write_json(place, found)
        found = read_json(place)
        if "fault" in found:
            return Admission(False, "does_not_compile", {"detail": found["fault"]})
        return Admission(True, "", admission.evidence | found | {"rates": asdict(self.rates)})

    def _compiled(self, code: str) -> dict[str, Any]:
        judge = self.pool.judge
        with judge.device:
            bench = Bench(self.params, judge.nursery, code)
            try:
                arms = {role: bench.arm(role) for role in ("compile", "noop")}
                raw: dict[str, list[float]] = {role: [] for role in arms}
                for _ in range(ROUNDS):
                    sets = bench.fresh_sets()
                    for role, arm in arms.items():
                        raw[role].append(arm.round("time", sets)[0])
                state = layout([(tuple(shape), dtype) for _, shape, dtype in bench.description.state])[0]
                slots = [*bench.inputs.slots, *bench.outputs.slots, *state]
                return {"compile_seconds": float(statistics.median(net(raw["compile"], raw["noop"]))), "compulsory_bytes": sum(slot.bytes for slot in slots)}
            finally:
                bench.close()

    def _path(self, parts: list[Any]) -> Path:
        key = digest_json(parts)
        return self.pool.verdicts / key[:2] / f"{key}.json"


def headroom(evidence: Mapping[str, Any], flops: int | None) -> dict[str, Any]:
    """`headroom`, and the operations that it counts (None: unknown), from an admission's evidence; {} where the compile
    baseline was not measured."""
    if "compile_seconds" not in evidence:
        return {}
    rates = Rates(**evidence["rates"])
    floor = max(evidence["compulsory_bytes"] / rates.bandwidth, (flops or 0) / rates.flops)
    return {"headroom": round(evidence["compile_seconds"] / floor, 4), "operations": flops}


def weighed(tasks: Iterable[KernelTask]) -> list[KernelTask]:
    """Tasks as often as they are worth in one pass of training: once where nothing is to be won or nothing is known, once
    more with every doubling of the headroom, four times at most."""
    return [task for task in tasks for _ in range(min(LIKED, 1 + int(math.log2(max(task.evidence.get("headroom", 1.0), 1.0)))))]
