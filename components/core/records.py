"""The base class of records, and the types and kinds of parameters.

The kind of a parameter is `result` or `throughput`. Only parameters of the kind `result` enter the keys,
which are the digests under which the results of runs and of stages (steps of the pipeline) are stored and
found again.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Device = Literal["cpu", "cuda"]
TrainingStage = Literal["warmup", "rejection", "critic", "agentic"]
Precision = Literal["strict-fp32", "tf32"]
TaskDtype = Literal["float32", "float16", "bfloat16"]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Tasks = Annotated[int, Field(ge=1, le=1_000_000)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Minutes = Annotated[str, Field(pattern=r"^[1-9][0-9]*min$")]


class FrozenModel(BaseModel):
    """Base class of records whose fields cannot be assigned, and which have no other keys than their fields.

    Pydantic raises ValidationError if a record is made with an unknown key or a value of a wrong type.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


def result(description: str) -> Any:
    """Return the pydantic field of a parameter that changes what a run computes, measures or publishes.

    Such a parameter has the kind `result`: its value enters the keys, which are the digests under which
    results are stored and found again. `description` is the parameter's meaning for people.
    """
    return Field(description=description, json_schema_extra={"kind": "result"})


def throughput(description: str) -> Any:
    """Return the pydantic field of a parameter that does not enter the keys under which results are stored.

    `description` is the parameter's meaning for people. Such a parameter has the kind `throughput`. It says
    where or how fast something is computed, with how much memory, how often it is saved, or when it is given
    up. Another value of the parameter changes a result that is computed to its end at most by rounding.
    """
    return Field(description=description, json_schema_extra={"kind": "throughput"})
