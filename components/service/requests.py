"""The service's requests and answers in JSON, and the exception whose message a caller gets as the answer."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, FiniteFloat, model_validator
from pydantic.json_schema import SkipJsonSchema

from components.core.params import Params
from components.core.records import FrozenModel, Precision
from components.judge.pool.service_client import MOST_MEASUREMENTS
from components.judge.verdict import Admission, Labels, Verdict
from components.service.job_store import Kind, State

# Largest number of characters of a task's source.
TASK_CHARACTERS = 256 << 10
# Largest number of entries of a request's objects and lists together. Each entry that is faulty is an error
# of its own, which takes a hundred times the memory and time of the entry's text.
MOST_ENTRIES = 10_000
# Entries of a verdict's evidence that callers get. The seeds of the correctness sets, which later candidates
# of the task get too, and the numbers by which verification differs from timing are not among them.
PUBLIC_EVIDENCE = (
    "trivial_answer",
    "judge",
    "isolation",
    "clock",
    "device",
    "torch",
    "compiler",
    "task",
    "candidate",
    "extensions_not_built",
    "raw_seconds",
    "compile_mode",
    "compile_seconds",
    "compile_cached",
    "limit",
    "gpu",
    "gpu_2",
    "labels",
)


class ServiceError(Exception):
    """An error that is answered with an HTTP status and one sentence.

    `status` is the HTTP status and `message` the sentence. `retry_after` is the number of seconds after which
    the caller may try again, or None if no time is stated.
    """

    def __init__(self, status: int, message: str, *, retry_after: float | None = None):
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


def _check_text(text: str) -> str:
    """Return the text; raise ValueError if it has surrogates, which JSON can represent and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("not text, since it has a lone surrogate; send UTF-8") from error
    return text


Text = Annotated[str, AfterValidator(_check_text)]
Source = Annotated[Text, Field(max_length=TASK_CHARACTERS)]
Measurement = Annotated[
    int,
    Field(
        ge=1,
        le=MOST_MEASUREMENTS,
        description="1 is the first measurement of this candidate, and repeats it at no cost; 2 measures it "
        "anew. All are counted, and the count is part of every answer",
    ),
]


class Body(FrozenModel):
    """Base class of the bodies of requests, with the settings of the judge that a caller may choose.

    `precision` replaces the service's, unless it is None. `params` replaces all parameters of the service for
    this request. It is accepted only over the Unix socket, from the account that runs the service.
    """

    precision: Precision | None = Field(None, description="by default the service's")
    params: SkipJsonSchema[Params | None] = None

    @model_validator(mode="before")
    @classmethod
    def _few_entries(cls, body: Any) -> Any:
        count, waiting = 0, [body]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict | list):
                count += len(value)
                if count > MOST_ENTRIES:
                    raise ValueError(
                        f"it has more than {MOST_ENTRIES} entries; send the sources of one candidate"
                    )
                waiting += value.values() if isinstance(value, dict) else value
        return body

    def settings(self, params: Params) -> Params:
        """Return the parameters with which this request is judged.

        They are `params`, the service's own, in which the settings that the request chooses are replaced.
        """
        params = self.params or params
        return params if self.precision is None else params.model_copy(update={"precision": self.precision})


class JudgementBody(Body):
    """Request to judge a candidate on a task that the service lists, or whose source the caller sends.

    A task is a PyTorch module that is to be made faster, and a candidate the files of an implementation of
    it. Exactly one of `task` (the id of a listed task) and `code` (a task's source) must be given.
    `measurement` is 1 for the first measurement of these files, and a larger number to measure them anew.
    """

    task: str = Field("", description="task_id of a task that GET /v1/tasks lists")
    code: Source = Field("", description="source of a task of the caller")
    files: dict[Text, Text] = Field(description="model_new.py and kernels/NAME: path and text of each file")
    compare_compile: bool | None = Field(
        False,
        description="compare every correct candidate with the fastest mode of torch.compile; otherwise only "
        "one that is faster than eager, with the default mode; null compares none",
    )
    against: dict[Text, Text] | None = Field(
        None,
        description="files of another candidate, with which this one is compared in place of torch.compile",
    )
    measurement: Measurement = 1
    labels: Labels | None = Field(
        None, description="rules by which is judged (docs/judge.md); by default the service's"
    )

    @model_validator(mode="after")
    def _one_task(self) -> "JudgementBody":
        if bool(self.task) == bool(self.code):
            raise ValueError("give either task, an id of GET /v1/tasks, or code, the source of a task")
        return self

    def settings(self, params: Params) -> Params:
        params = super().settings(params)
        if self.labels is None:
            return params
        return params.model_copy(
            update={"sandbox": params.sandbox.model_copy(update=self.labels.model_dump())}
        )


class AdmissionBody(Body):
    """Request to check whether a task can be judged.

    A task is a PyTorch module that is to be made faster; `code` is its source. `headroom` is whether
    torch.compile is measured too, and `eager_seconds` has the shortest and the longest time that one eager
    call may take. With `memory_only` nothing is measured: the check is only whether the source runs and the
    memory suffices.
    """

    code: Source = Field(min_length=1, description="source of the task")
    headroom: bool = Field(False, description="measure torch.compile too")
    eager_seconds: tuple[FiniteFloat, FiniteFloat] = Field(
        (1e-9, 1e9), description="window for the eager time of one call, seconds"
    )
    memory_only: bool = Field(
        False, description="measure nothing, and check only that it runs and can be judged in the memory"
    )


class JobView(FrozenModel):
    """State of a job, and its result if it is done.

    A job is a request for a verdict on a candidate (an implementation of a PyTorch module) or for an
    admission (the check whether candidates of a module can be judged). The result is `verdict` for the kind
    judgement and `admission` for the kind admission.
    """

    id: str
    kind: Kind
    state: State
    task_id: str
    measurement: int = Field(description="which measurement of the candidate this is")
    measurements: int = Field(description="how many the caller has asked for so far")
    position: int | None = Field(None, description="place among the caller's own queued jobs")
    progress: str = Field("", description="step of the judge, while the job is running")
    verdict: Verdict | None = None
    admission: Admission | None = None
    error: str = Field("", description="why a job failed; no fault of the candidate")
    reason: str = Field("", description="word for the cause, such as task, too_large or judge")
    status: int = Field(200, exclude=True)  # of HTTP

    @property
    def has_ended(self) -> bool:
        return self.state not in ("queued", "running")


class TaskSummary(FrozenModel):
    """A task, which is a PyTorch module that is to be made faster, in the service's list.

    `level` is its level in an evaluation suite, or None, and `ops` are the names of its operators in their
    order.
    """

    task_id: str
    name: str
    level: int | None
    ops: tuple[str, ...]


class TaskView(TaskSummary):
    """A task, which is a PyTorch module that is to be made faster, with its source `code`.

    `prompt` is the message that asks a language model for a kernel.
    """

    code: str
    prompt: str = Field(description="how kernels are written (SKILL.md), the device and the source")


def public_verdict(verdict: Verdict) -> Verdict:
    """Return the verdict with only those entries of its evidence that PUBLIC_EVIDENCE names.

    The evidence is the record of what was measured, for the whole task and for each of its workloads (calls
    of `get_inputs`). Its other entries, such as the seeds of inputs, could help a later candidate to cheat.
    """

    def public(evidence: dict[str, Any]) -> dict[str, Any]:
        return {name: evidence[name] for name in PUBLIC_EVIDENCE if name in evidence}

    evidence = public(verdict.evidence)
    if workloads := verdict.evidence.get("workloads"):
        evidence["workloads"] = [public(one) for one in workloads]
    return verdict.model_copy(update={"evidence": evidence})
