"""Records that the judge returns: the verdict on one candidate, and the admission of a task.

A candidate is an implementation of a task's module, and an admission says whether candidates of a task can be
judged. `milestone` computes the reward of a trajectory (an attempt of the policy) from its verdict (CUDA
Agent, eq. 1). `rejecting` converts a candidate's failures into the status, reason and log of its verdict. The
version of the judge (`VERSION`) is a digest of the sources of the packages `judge` and `sandbox`.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

from pydantic import Field

from components.core.config import PROJECT, result_values
from components.core.errors import UserError
from components.core.files import digest_bytes, digest_json
from components.core.params import JudgeParams, Sandbox
from components.core.records import FrozenModel
from components.sandbox.runner_process import RunnerError

SOURCES = sorted(
    path
    for package in ("judge", "sandbox")
    for path in (PROJECT / "components" / package).rglob("*")
    if path.suffix in (".py", ".cpp")
)
# Digest of the sources of the packages judge and sandbox, which is stored in the evidence of verdicts.
VERSION = digest_bytes(b"".join(path.read_bytes() for path in SOURCES))[:16]
# Ratio of baseline time to candidate time above which a candidate is called faster.
MARGIN = 1.05
# Suffix of the reasons for which a task is refused that name an input without effect on the output.
UNSURE = "_does_not_matter"
AnyParams = TypeVar("AnyParams", bound=JudgeParams)
# Smallest ratio over a baseline on each workload of a task with which a candidate is called faster.
WORKLOAD_MARGIN = 0.9
# Results of judging a candidate; `infrastructure` is a fault of the judge or the task.
Status = Literal[
    "correct",
    "build_failed",
    "load_failed",
    "crashed",
    "timed_out",
    "out_of_memory",
    "wrong_output",
    "forbidden",
    "infrastructure",
]


class Labels(FrozenModel):
    """Rules under which a verdict was reached, which are parameters of the section sandbox.

    A candidate is an implementation of a task's module that is judged. `rules` is `kernel-only` if it may
    compute only with its own kernels, and `any` if it may use torch too. `weights` is `state_dict` if
    candidates get parameters that the judge has drawn, and `seed` if they keep those that their constructor
    makes under the judge's seed. `tolerance` is `strict` for errors relative to float64, and `kernelbench` if
    an output within KernelBench's tolerances is correct too. `input_cache` is `cold` if a GPU's L2 cache
    holds no inputs when the calls of a round (a series of timed calls) begin, and otherwise `warm`.
    `compile_modes` is `default` if torch.compile has its default mode on a GPU, and `all` if it has the
    fastest of several. Verdicts with different labels must not be compared. The defaults are the labels of
    training and promotion.
    """

    rules: Literal["kernel-only", "any"] = "kernel-only"
    weights: Literal["state_dict", "seed"] = "state_dict"
    tolerance: Literal["strict", "kernelbench"] = "strict"
    input_cache: Literal["warm", "cold"] = "warm"
    compile_modes: Literal["all", "default"] = "all"

    @classmethod
    def of(cls, sandbox: Sandbox) -> Self:
        return cls.model_validate({name: getattr(sandbox, name) for name in cls.model_fields})

    def __str__(self) -> str:
        text = f"rules {self.rules}, weights by {self.weights}, tolerance {self.tolerance}"
        text += ", cold cache" if self.input_cache == "cold" else ""
        return f"{text}, torch.compile's default mode" if self.compile_modes == "default" else text


def protocol_digest(params: JudgeParams) -> str:
    """Return the digest of all parameters on which a verdict depends.

    These are the device, the precision, and the parameters of the section sandbox that change results, and
    not only the speed of the work. The judge's sources (`VERSION`) are not part of it.
    """
    return digest_json(result_values(params, ("device", "precision", "sandbox")))


def with_standard_labels(params: AnyParams) -> AnyParams:
    """Return a copy of `params` with the rules of judging for training and promotion (`Labels`).

    The parameters of the section sandbox that are fields of `Labels` get the default values of that class.
    """
    sandbox = params.sandbox.model_copy(update=Labels().model_dump())
    return params.model_copy(update={"sandbox": sandbox})


def require_standard_labels(sandbox: Sandbox, purpose: str) -> None:
    """Raise UserError unless `sandbox` has the rules of judging for training and promotion.

    These rules are the default values of `Labels`. `purpose` is what the parameters are to be used for, such
    as `training`, for the error's text.
    """
    for name, default in Labels().model_dump().items():
        value = getattr(sandbox, name)
        if value != default:
            raise UserError(f"sandbox.{name}: {value} is not for {purpose}; set sandbox.{name}={default}.")


class Ratio(FrozenModel):
    """Ratio of baseline seconds to candidate seconds over paired rounds, with a 95 % interval.

    A baseline is for example eager, a candidate is the implementation that is judged, and a round is a series
    of timed calls. `estimate` is the ratio, above 1 if the candidate is faster. `low` and `high` are the ends
    of the interval, which is computed with a block bootstrap (`statistics.paired_ratio`).
    """

    estimate: float
    low: float
    high: float


class Seconds(FrozenModel):
    """Median seconds of one call of the candidate and of each baseline; a field is None if not measured.

    The candidate is the implementation that is judged, and the baselines are eager, torch.compile, and
    `against`, another candidate with which it was compared. The time of the no-op, a process that computes
    nothing, has been subtracted. `limit` is not a median but a lower bound that follows from the measured
    speed of the device (`judge/limit.py`).
    """

    candidate: float | None = None
    eager: float | None = None
    compile: float | None = None
    limit: float | None = None
    against: float | None = None


class Speedup(FrozenModel):
    """Speed-ups of a candidate over eager, over torch.compile, and over another candidate (`against`).

    A candidate is an implementation of a task's module that is judged. A field is None if it was not
    measured.
    """

    eager: Ratio | None = None
    compile: Ratio | None = None
    against: Ratio | None = None


class WorkloadFigures(FrozenModel):
    """Median seconds and speed-ups of a candidate on one workload, which `call` names: `get_inputs(32, 128)`.

    A candidate is an implementation of a task's module, and a workload is one call of the task's `get_inputs`
    on which candidates are judged. All figures are None if the candidate failed on this workload.
    """

    call: str
    seconds: Seconds = Seconds()
    speedup: Speedup = Speedup()


class Verdict(FrozenModel):
    """The judge's verdict on one candidate, an implementation of a task's module with its own kernels.

    `reason` is a short code for programs, such as `max_error:given`, or "" if the candidate is correct, and
    `log` is a short text for the policy that wrote the candidate. `evidence` has what shows how the verdict
    was reached, such as versions, seeds and the seconds of each round (series of timed calls). `milestone` is
    the reward that the function of the same name computes: 1 for a correct candidate, 2 if it is faster than
    eager, 3 if it is faster than torch.compile too, and -1 if it is not correct.

    `workloads` is empty unless the task names workloads, which are calls of its `get_inputs`
    (core/workloads.py). It then has the figures on each of them, in their order, and `seconds` and `speedup`
    are geometric means over them. If the candidate failed on a workload, `workloads` has only that one.
    """

    status: Status
    reason: str = ""
    milestone: Literal[-1, 1, 2, 3] = -1
    device: str = "cpu"
    precision: str = "strict-fp32"
    seconds: Seconds = Seconds()
    speedup: Speedup = Speedup()
    evidence: dict[str, Any] = Field(default_factory=dict)
    log: str = ""
    workloads: tuple[WorkloadFigures, ...] = ()


def workload_line(figures: WorkloadFigures) -> str:
    """Return the speed-ups on one workload as text: `get_inputs(32, 128): 1.20x eager, 1.10x compile`.

    A workload is one call of a task's `get_inputs`. Speed-ups that were not measured are left out.
    """
    ratios = [f"{ratio.estimate:.2f}x {name}" for name, ratio in figures.speedup if ratio is not None]
    return f"{figures.call}: {', '.join(ratios)}"


def rates_line(verdict: Verdict) -> str:
    """Return a text with the rates that the candidate of a verdict attains, and those measured of the device.

    The text is, for example, `Memory: 8.5 of 20.8 GB/s.` The first figure is the rate at which each input,
    parameter and output is moved once in the candidate's time per call, and the second is the device's
    bandwidth. A task with matrix products or convolutions also has the rate of their operations: `Products:
    31.0 of 82.3 GFLOP/s.` (`limit.Limit`). The text is empty if no single call was measured, as for a
    candidate that failed or a task with several workloads (calls of its `get_inputs`).
    """
    limit, seconds = verdict.evidence.get("limit"), verdict.seconds.candidate
    if not limit or not seconds:
        return ""
    rates = [("Memory", limit["bytes"], limit["bandwidth"], "GB/s")]
    if limit["operations"]:
        rates.append(("Products", limit["operations"], limit["operations_per_second"], "GFLOP/s"))
    return " ".join(
        f"{name}: {amount / seconds / 1e9:.1f} of {rate / 1e9:.1f} {unit}."
        for name, amount, rate, unit in rates
    )


def counter_lines(verdict: Verdict) -> list[str]:
    """Return a line for each kernel of one call, with what the GPU counted while Nsight Compute observed it.

    A line is, for example, `pass0: 9.7 us, DRAM 61 %, SM 6 %, occupancy 68 %, 32 registers, 0 accesses of
    local memory, 0 bank conflicts.` (`counters.METRICS`). If the counters could not be read, a line says why.
    If the task names workloads (several calls of its `get_inputs`), each line begins with its call. There are
    no lines unless sandbox.counters was set.
    """
    single = verdict.evidence.get("workloads", [{}])
    calls = [f"{one.call}: " for one in verdict.workloads] or [""]
    lines = []
    for call, evidence in zip(calls, single, strict=False):
        found = (verdict.evidence | evidence).get("counters", {"kernels": [], "launches": 0})
        if "error" in found:
            lines.append(f"{call}the GPU's counters were not read: {found['error']}")
            continue
        lines += [
            f"{call}{kernel['kernel']}: {_number(kernel['nanoseconds'], 1e-3, 1)} us, DRAM "
            f"{_number(kernel['dram_percent'])} %, SM {_number(kernel['sm_percent'])} %, occupancy "
            f"{_number(kernel['occupancy_percent'])} %, {_number(kernel['registers'])} registers, "
            f"{_number(kernel['local_accesses'])} accesses of local memory, "
            f"{_number(kernel['bank_conflicts'])} bank conflicts."
            for kernel in found["kernels"]
        ]
        if more := found["launches"] - len(found["kernels"]):
            lines.append(f"{call}{more} more kernels.")
    return lines


def _number(value: float | None, factor: float = 1.0, digits: int = 0) -> str:
    return "?" if value is None else f"{value * factor:.{digits}f}"


def milestone(verdict: Verdict) -> Literal[-1, 1, 2, 3]:
    """Return the reward of a verdict on a candidate, which is -1, 1, 2 or 3.

    It is -1 for a candidate that is not correct, 1 for a correct one, 2 if it is also faster than eager, and
    3 if it is also faster than both eager and torch.compile. Faster means that the estimated speed-up is
    above `MARGIN` (1.05), and that none on a workload (a call of the task's `get_inputs`) is below
    `WORKLOAD_MARGIN` (0.9). The field `milestone` of the verdict is not read.
    """
    if verdict.status != "correct":
        return -1
    if not _is_faster(verdict, "eager"):
        return 1
    return 3 if _is_faster(verdict, "compile") else 2


def holds_everywhere(workloads: Sequence[WorkloadFigures], baseline: Literal["eager", "compile"]) -> bool:
    """Return whether the ratio of the times of baseline and candidate is at least 0.9 on every workload.

    A workload is one call of a task's `get_inputs`. The result is also True without workloads, and False if a
    ratio was not measured.
    """
    ratios = [one.speedup.eager if baseline == "eager" else one.speedup.compile for one in workloads]
    return all(ratio is not None and ratio.estimate >= WORKLOAD_MARGIN for ratio in ratios)


def _is_faster(verdict: Verdict, baseline: Literal["eager", "compile"]) -> bool:
    ratio = verdict.speedup.eager if baseline == "eager" else verdict.speedup.compile
    return ratio is not None and ratio.estimate > MARGIN and holds_everywhere(verdict.workloads, baseline)


@dataclass(frozen=True)
class Admission:
    """Result of checking whether candidates (implementations of its module) of a task can be judged.

    `reason` is a short code, such as `does_not_run`, which is empty if the task is admitted. `evidence` holds
    the measured figures, such as `eager_seconds`, or the text of a failure under `detail`.
    """

    admitted: bool
    reason: str
    evidence: dict[str, Any]


# Pattern of the runner messages that may appear in a verdict after the runner has received timed inputs. Any
# other message is replaced by `HIDDEN`, because a candidate could put answers into its message for other
# candidates of the task, whose inputs are mixed from the same sets.
PLAIN_REASON = re.compile(
    "wrong_number_of_outputs|not_a_plain_tensor|output_aliases_input|unreadable_output|output_is_mapped"
    "|output_not_written"
    "|wrong_(?:shape|dtype|device)|torch_compute"
)
HIDDEN = "it failed in a timed call, having passed verification"

# Status, reason and log of a verdict, in which `{text}` is replaced by the runner's message.
Rejection = tuple[Status, str, str]

# Rejections by the kind of the RunnerError, for errors that are raised while the candidate is called.
RUN_ERRORS: dict[str, Rejection] = {
    "crashed": ("crashed", "process_died", "{text}"),
    "timed_out": ("timed_out", "run_limit", "{text}"),
    "out_of_memory": ("out_of_memory", "memory_limit", "{text}"),
    "error": ("crashed", "exception", "{text}"),
    "not_built": ("build_failed", "compiler", "{text}"),
    "protocol": ("crashed", "protocol", "{text}"),
    "wrong": ("wrong_output", "{text}", "the output has not the reference's form: {text}"),
    "forbidden": ("forbidden", "{text}", "computing with torch is forbidden: {text}"),
}
# Rejections by the kind of the RunnerError, for errors that are raised while the candidate is loaded. No
# output exists yet while a candidate is loaded. The kind `wrong`, which is an error of a call, is therefore
# reported as a crash.
LOAD_ERRORS: dict[str, Rejection] = RUN_ERRORS | {
    "error": ("load_failed", "import", "{text}"),
    "wrong": ("crashed", "wrong", "{text}"),
    "unknown_result": (
        "load_failed",
        "constructor",
        "the constructor calls torch's operators in another order in each process; the next one was {text}.",
    ),
}


@dataclass(eq=False)
class Rejected(Exception):
    """Exception for a candidate that fails, with the status, reason and log of its verdict (`Verdict`).

    A candidate is an implementation of a task's module that is judged.
    """

    status: Status
    reason: str
    log: str


@contextlib.contextmanager
def rejecting(errors: Mapping[str, Rejection], *, hide_text: bool = False) -> Iterator[None]:
    """Convert a RunnerError raised inside the context into Rejected, as `errors` defines for its kind.

    A RunnerError is a failure of the sandboxed process of a candidate, and Rejected has the status, reason
    and log of the candidate's verdict. `errors` maps a kind, such as `timed_out`, to these three, in which
    `{text}` is replaced by the process's message. A kind without an entry gets the status `crashed`. If
    `hide_text` is set, only the part of the message that matches `PLAIN_REASON` is used; a message without a
    match is replaced by `HIDDEN`.
    """
    try:
        yield
    except RunnerError as error:
        text = error.text
        if hide_text:
            known = PLAIN_REASON.match(text)
            text = known[0] if known else HIDDEN
        status, reason, log = errors.get(error.kind, ("crashed", error.kind, "{text}"))
        raise Rejected(status, reason.replace("{text}", text), log.replace("{text}", text)) from error
