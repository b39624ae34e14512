"""What the judge holds for one task: its parameters, secret inputs, expected outputs, and its baselines kept warm.

Inputs and expected outputs come from an oracle, a sandboxed runner of the task's own source that is dead before any
candidate could see them. They are shared by the candidates of one task, each of which is a fresh process that has seen none.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.core.config import Params
from components.core.errors import TaskError
from components.core.files import digest_bytes
from components.judge.correctness import Expected, departure
from components.judge.device_scheduler import DeviceScheduler
from components.judge.input_mixing import DOUBLED_BYTES, Mix, Sets
from components.judge.measurement import BASELINE_LIMITS, Dtype, Form, Part, Shape, StagedInputs, TimedRunner
from components.sandbox import shared_memory
from components.sandbox.input_distributions import INPUT_DISTRIBUTIONS
from components.sandbox.runner_factory import RunnerFactory
from components.sandbox.runner_process import Runner, RunnerError
from components.sandbox.runner_protocol import MemoryLayout, RegionName, Role, RoleHeader, ZygoteKind

MAX_SETS = {"cpu": 32, "cuda": 256}
"""Most calls in one round."""
MAX_ARM_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}
"""Most memory for the inputs and outputs of one round of one arm, unless one call has more."""
LARGEST_SHARE = 1 / 16
"""Of a GPU's memory, for the inputs and outputs of one call: four arms hold them two and a half times, the bank five times."""
FAMILY_BYTES = 24 << 30
"""Most memory for the families of inputs with their expected outputs, in float64 too; a large task has fewer families, the given one at least."""
RUNNER_SHARE = 0.125
"""Of a GPU's memory, for what one task's runner may allocate beside others: two tasks of 1,200 took 65 and 80 GB and broke their neighbours."""
ROUND_SHARE = 0.25
"""Of the calls that a round of a candidate has, in an admission on a GPU, where everything else stands still meanwhile: a window of
times and headroom need less than a reward does. And of the memory for them, which is what keeps more tasks from being admitted side by side."""
CONTEXT_BYTES = 600 << 20
"""What CUDA takes for each process."""
BASES = 6
"""Input sets that the calls of timed rounds are mixed from (see `Mix`): so many, or as many as MAX_ARM_BYTES hold, but two at least."""


class Description(BaseModel):
    """What a task's source says of itself; checked, since the source is untrusted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    init_inputs: list[Any] = Field(max_length=64)
    inputs: list[Form | None] = Field(max_length=64)
    scalars: list[list[Any] | None] = Field(max_length=64)
    outputs: list[Form] = Field(min_length=1, max_length=64)
    state: list[tuple[str, Shape, Dtype]] = Field(max_length=4096)
    parameters: list[str] = Field(max_length=4096)
    seconds: float = Field(ge=0, lt=1e6)
    peak_bytes: int = Field(ge=0)


class Bench:
    """One task, ready to judge candidates; made once and kept warm.

    `only` names the zygote of a process that plays all of the task's roles, one after another. No candidate is held against
    such a bench: it is for admissions, where a driver that makes five CUDA contexts a second (seen on an H200) would be
    most of the time.
    """

    def __init__(
        self,
        params: Params,
        runner_factory: RunnerFactory,
        turns: DeviceScheduler,
        code: str,
        *,
        only: ZygoteKind | None = None,
        share: float = 1.0,
    ):
        self.params = params
        self.runner_factory = runner_factory
        self.scheduler = turns
        self.code = code
        self.users = 0
        self.lock = threading.RLock()
        self.arms: dict[str, TimedRunner] = {}
        self.compiles = True
        """Until torch.compile failed where it was only begun early."""
        self.modes: dict[str, float] = {}
        """Seconds of one call in each mode of torch.compile, once an evaluation asked (compiled.py)."""
        self.prepared: dict[int, list[Expected]] = {}
        self.slack: dict[int, list[tuple[float, float]]] = {}
        self.closers: list[Any] = []
        self.only = only
        self.share = share
        """Of a GPU's memory, for what the only process may allocate."""
        self.lent: tuple[Any, Any, Any] | None = None
        """Shared memory of the only process's arms."""
        self._oracle: Runner | None = None
        with self._blaming_the_task():
            self._oracle = self._described()
            with turns.background_work(self._oracle):
                said = self._oracle.receive()
            self.description = Description.model_validate(json.loads(said))
            self._lay_out()

    def _described(self) -> Runner:
        header: RoleHeader = {"role": "describe", "code": self.code, "precision": self.params.precision}
        if self.only is not None:
            header |= {"zygote": self.only, "share": self.share}
            if self.only == "compile":
                header["cache"] = self._cache
        return self.runner_factory.spawn(header, seconds=self.params.sandbox.run_seconds)

    @property
    def _cache(self) -> str:
        return digest_bytes(self.code.encode())

    def start(self, header: RoleHeader, descriptors: tuple[int, ...], *, seconds: float) -> Runner:
        """What plays the role that `header` names: a runner of its own, or the only one."""
        if self.only is None:
            return self.runner_factory.spawn(header, descriptors, seconds=seconds)
        assert self._oracle is not None
        self._oracle.deadline = time.monotonic() + seconds
        self._oracle.send({"op": "leave"})
        self._oracle.send(header | {"device": self.params.device}, descriptors)
        return self._oracle

    def memory(self) -> tuple[Any, Any, Any]:
        """Shared memory for the inputs, on cuda the outputs, and the parameters of one arm: its own, or one candidate could
        write what others load; the arms of an only process, one after another, have the same."""
        if self.lent is not None:
            return self.lent
        with contextlib.ExitStack() as made:  # the second may find the device full

            def shared(size: int) -> Any:
                return made.enter_context(
                    contextlib.closing(shared_memory.make_buffer(self.params.device, size))
                )

            outputs = shared(self.outputs.stride * self.slots) if self.params.device == "cuda" else None
            memory = (
                shared(self.inputs.stride * (self.slots + 1)),
                outputs,
                shared(self.parameters_part.bytes),
            )
            kept = made.pop_all()
        if self.only is not None:
            self.closers.append(kept)
            self.lent = memory
        return memory

    def end(self, runner: Runner | None, memory: tuple[Any, Any, Any]) -> None:
        """What an arm had; what an only process has ends with the bench."""
        if self.only is not None:
            return
        if runner is not None:
            runner.close()
        for buffer in filter(None, memory):
            buffer.close()

    @contextlib.contextmanager
    def _blaming_the_task(self) -> Iterator[None]:
        """What its own source does wrong is the task's fault; whatever it is, nothing stays open."""
        try:
            yield
        except RunnerError as error:
            self.close()
            last = error.text.strip().splitlines()[-1:]
            text = f"{error.kind}: {''.join(last)}"[:300]
            raise TaskError(text, out_of_memory=error.kind == "out_of_memory") from error
        except (ValidationError, ValueError, AttributeError) as error:
            self.close()
            raise TaskError(f"description: {error}"[:300]) from error
        except BaseException:
            self.close()
            raise

    def _lay_out(self) -> None:
        sandbox, description = self.params.sandbox, self.description
        calls = -(-int(sandbox.round_seconds * 1e9) // max(1, int(description.seconds * 1e9)))
        share = ROUND_SHARE if self.only is not None and self.scheduler.wall else 1.0
        per_round = max(2, int(share * max(sandbox.sets_per_round, min(MAX_SETS[self.params.device], calls))))
        self.inputs = Part.of([form for form in description.inputs if form is not None], 1)
        self.outputs = Part.of(description.outputs, 1)
        wide = [
            (shape, "float64" if dtype.startswith(("float", "bfloat")) else dtype)
            for shape, dtype in description.outputs
        ]
        self.expected = Part.of(wide, 1)
        self.parameters_part = Part.of([(shape, dtype) for _, shape, dtype in description.state], 1)
        one = self.inputs.stride + self.outputs.stride
        largest = self.scheduler.total * LARGEST_SHARE if self.scheduler.wall else MAX_ARM_BYTES["cpu"]
        if one > largest:
            raise ValueError(f"{one} bytes for one set of inputs and outputs are too many to measure")
        most = max(1, int(share * MAX_ARM_BYTES[self.params.device]) // one)
        self.per_round = min(per_round, most)
        least = 1 if self.only is None else 2  # an admission compares two
        families = max(
            least,
            min(
                sandbox.correctness_sets,
                FAMILY_BYTES // (self.inputs.stride + self.outputs.stride + 2 * self.expected.stride),
            ),
        )
        self.slots = min(max(per_round, families), most)
        self.families = list(itertools.islice(itertools.cycle(INPUT_DISTRIBUTIONS), families))
        bases = BASES if self.only is None else 2
        self.total = families + max(2, min(bases, MAX_ARM_BYTES[self.params.device] // self.inputs.stride))

    @property
    def bytes(self) -> int:
        """Memory of the bank, of what is prepared from it, and of the arms with what their runners hold, about."""
        inputs, outputs, exact = self.inputs.stride, self.outputs.stride, self.expected.stride
        doubled = 2 * (self.total - len(self.families)) if inputs <= DOUBLED_BYTES else 0
        prepared = exact * (
            len(self.families) if self.only is None else 3
        )  # the last one, and what making it takes
        bank = (
            inputs * (self.total + doubled)
            + (outputs + exact) * len(self.families)
            + prepared
            + 8 * self.parameters_part.bytes
        )
        oracle = CONTEXT_BYTES + min(
            3 * self.description.peak_bytes, int(self.share * self.scheduler.total)
        )  # in float64 too
        arm = (
            CONTEXT_BYTES + inputs * (self.slots + 1) + 3 * outputs * self.slots + self.description.peak_bytes
        )
        arms = (
            arm + outputs * self.slots if self.only is not None else 5 * arm
        )  # a candidate, eager, the no-op, torch.compile in two modes
        return bank + max(oracle, inputs * self.slots + arms)  # the oracle is gone by then

    def _keep(self, buffer: Any) -> Any:
        self.closers.append(buffer)
        return buffer

    def _connect(self, oracle: Runner, bank: dict[RegionName, tuple[Part, Any]], sets: int) -> None:
        """Hand the oracle its memory: `bank` names inputs, outputs and expected with their layout and buffer."""
        layout: MemoryLayout = {
            "sets": sets,
            "scalars": self.description.scalars,
            "names": [name for name, _, _ in self.description.state],
            "parameters": self.parameters_part.json() | {"bytes": self.parameters.size},
        }
        for name, (part, buffer) in bank.items():
            layout[name] = part.json() | {"bytes": buffer.size}
        header = {
            "role": "reference",
            "code": self.code,
            "precision": self.params.precision,
            "device": self.params.device,
            "init_inputs": self.description.init_inputs,
            "layout": layout,
        }
        oracle.send({"op": "leave"})
        oracle.send(header, (self.parameters.fd, *(buffer.fd for _, buffer in bank.values())))
        oracle.receive()

    def fill(self) -> None:
        """Make what candidates are held against; a bench is of no use before. Raises TaskError."""
        assert self._oracle is not None
        self._oracle.deadline = time.monotonic() + self.params.sandbox.run_seconds
        with self._blaming_the_task():
            self._fill(self._oracle)
        if self.only is None:  # dead before any candidate could see it
            self._oracle.close()
            self._oracle = None

    def _fill(self, oracle: Runner) -> None:
        """Secret seeds; correctness sets of every family with their outputs, then the inputs that timed calls are made of."""
        device = self.params.device
        with self.scheduler.preparing():
            self.parameters = self._keep(shared_memory.make_buffer(device, self.parameters_part.bytes))
            self.bank_inputs = self._keep(shared_memory.make_buffer(device, self.inputs.stride * self.total))
            self.bank_single = self._keep(
                shared_memory.make_buffer(device, self.outputs.stride * len(self.families))
            )
            self.bank_expected = self._keep(
                shared_memory.make_buffer(device, self.expected.stride * len(self.families))
            )
        self.parameter_seed = secrets.randbits(62) & ~1
        self.seeds = [secrets.randbits(62) & ~1 for _ in range(self.total)]
        bank: dict[RegionName, tuple[Part, Any]] = {
            "inputs": (self.inputs, self.bank_inputs),
            "outputs": (self.outputs, self.bank_single),
            "expected": (self.expected, self.bank_expected),
        }
        with self.scheduler.background_work(oracle):
            self._connect(oracle, bank, self.total)
            oracle.request({"op": "parameters", "seed": self.parameter_seed})
            for index in range(self.total):
                exact = index < len(self.families)
                order = {
                    "op": "fill",
                    "set": index,
                    "seed": self.seeds[index],
                    "distribution": self.families[index] if exact else "given",
                }
                oracle.request(order | {"parameters": self.parameter_seed, "outputs": exact, "exact": exact})
        with self.scheduler.preparing():
            self.sets = self._keep(
                Sets(
                    [self.inputs.tensors(self.bank_inputs, index) for index in range(self.total)],
                    self.families,
                )
            )

    def probe(self, orders: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
        """Float32 outputs of the reference for each order; for admission, after its rounds."""
        device, count = self.params.device, len(orders)
        parts: dict[RegionName, Part] = {"inputs": self.inputs, "outputs": self.outputs}
        with self.scheduler.preparing():
            bank = {
                name: (part, shared_memory.make_buffer(device, part.stride * count))
                for name, part in parts.items()
            }
        assert self._oracle is not None
        self._oracle.deadline = time.monotonic() + self.params.sandbox.run_seconds
        try:
            with self.scheduler.background_work(self._oracle):
                self._connect(self._oracle, bank, count)
                for order in orders:
                    self._oracle.request(order)
            with self.scheduler.preparing():
                return [
                    [t.clone() for t in self.outputs.tensors(bank["outputs"][1], i)] for i in range(count)
                ]
        except RunnerError as error:
            raise TaskError(f"{error.kind}: {error.text[-200:]}") from error
        finally:
            for _, buffer in bank.values():
                buffer.close()

    def verify(self, arm: TimedRunner, operation: str, *, loose: bool = False) -> str | None:
        """Why the arm's outputs are wrong on the correctness sets, or None."""
        staging = StagedInputs(self, self.slots)
        for first in range(0, len(self.families), self.slots):
            sets = self.sets.verified()[first : first + self.slots]
            _, taken = arm.round(operation, staging.hold(sets))
            if (reason := self.wrong(sets, taken, loose=loose)) is not None:
                return reason
            if arm.changed:
                return "inputs_changed"
        return None

    def wrong(self, sets: list[Mix], taken: torch.Tensor, *, loose: bool = False) -> str | None:
        """Why the outputs in `taken` are wrong for correctness sets, or None; the reason names the input family."""
        for i, mix in enumerate(sets):
            for got, expected in zip(self._outputs(taken, i), self.expected_outputs(mix.first), strict=True):
                if (reason := expected.fault(got, loose=loose)) is not None:
                    return f"{reason}:{self.families[mix.first]}"
        return None

    def differs(self, taken: torch.Tensor, reference: torch.Tensor, sets: list[Mix]) -> str | None:
        """Why the outputs in `taken` are not those of a baseline on the same inputs, or None."""
        verified = [self._slack(self.families.index(mix.family)) for mix in sets]
        for index, slot in enumerate(self.outputs.slots):
            got, single = (
                rows.view(len(sets), -1)[:, slot.offset : slot.offset + slot.bytes].view(
                    getattr(torch, slot.dtype)
                )
                for rows in (taken, reference)
            )
            if (found := departure(got, single, [slacks[index] for slacks in verified])) is not None:
                return f"{found[1]}:{sets[found[0]].family}"
        return None

    def _outputs(self, taken: torch.Tensor, index: int) -> list[torch.Tensor]:
        start = index * self.outputs.stride
        return [
            taken[start + s.offset : start + s.offset + s.bytes].view(getattr(torch, s.dtype)).view(s.shape)
            for s in self.outputs.slots
        ]

    def expected_outputs(self, index: int) -> list[Expected]:
        """The outputs that are right for one correctness set, prepared at their first use, or at each where memory is short: an admission has two."""
        if index in self.prepared:
            return self.prepared[index]
        pairs = zip(
            self.outputs.tensors(self.bank_single, index),
            self.expected.tensors(self.bank_expected, index),
            strict=True,
        )
        made = [Expected(single, wide, self.params.sandbox, self.params.precision) for single, wide in pairs]
        self.slack[index] = [expected.slack for expected in made]
        if self.only is None:
            self.prepared[index] = made
        return made

    def _slack(self, index: int) -> list[tuple[float, float]]:
        """What a result may differ from a reference on one correctness set, by output (see `Expected`)."""
        if index not in self.slack:
            self.expected_outputs(index)
        return self.slack[index]

    def arm(self, role: str) -> TimedRunner:
        """A warm baseline: eager, noop, or compile, which may name a mode of torch.compile after a space."""
        with self.lock:
            return self._arm(role)

    def _arm(self, role: str) -> TimedRunner:
        if role not in self.arms:
            if self.only is not None:
                for other in list(self.arms):
                    self.drop(other)
            kind, _, mode = role.partition(" ")
            header: RoleHeader = {
                "role": cast("Role", kind),
                "code": self.code,
                "compile_mode": mode or "default",
            }
            if kind == "compile":
                header["cache"] = self._cache
            try:
                # The compile baseline lives long: its clock is the bench's, not one candidate's.
                self.arms[role] = TimedRunner(self, header, None, seconds=24 * 3600)
                if role == "noop":
                    return self.arms[role]
                limit = self.params.sandbox.run_seconds
                self.arms[role].warm(limit if self.only else BASELINE_LIMITS * limit)
                with self.scheduler.preparing():
                    reason = self.verify(self.arms[role], "time", loose=True)
                if reason is not None:
                    self.drop(role)
                    raise TaskError(f"{role}: {reason}")
            except RunnerError as error:
                self.drop(role)
                raise TaskError(f"{role}: {error.kind} {error.text[-200:]}") from error
            except BaseException:
                self.drop(role)
                raise
        return self.arms[role]

    def drop(self, role: str) -> None:
        """Forget a baseline that died; the next use starts it anew."""
        if role in self.arms:
            with self.scheduler.preparing():
                self.arms.pop(role).close()

    def lose(self, arm: TimedRunner) -> None:
        """Forget a baseline by what it is: the fastest torch.compile stands under its mode's name."""
        for role in [role for role, known in self.arms.items() if known is arm]:
            self.drop(role)

    def close(self) -> None:
        with self.scheduler.preparing():  # giving memory back holds up the whole device
            for arm in self.arms.values():
                arm.close()
            self.arms.clear()
            if self._oracle is not None:
                self._oracle.close()
                self._oracle = None
            self.prepared.clear()
            for closer in reversed(self.closers):
                closer.close()
            self.closers.clear()
            self.scheduler.tidy()
