"""The base class of records, and the types and kinds of parameters.

The kind of a parameter is `result` or `throughput`. Only parameters of the kind `result` enter the keys,
which are the digests under which the results of runs and of stages (steps of the pipeline) are stored and
found again.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from components.core.errors import UserError
from components.core.files import read_json

T = TypeVar("T")
Device = Literal["cpu", "cuda"]
TrainingStage = Literal["warmup", "rejection", "critic", "agentic"]
Precision = Literal["strict-fp32", "tf32"]
TaskDtype = Literal["float32", "float16", "bfloat16"]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Tasks = Annotated[int, Field(ge=1, le=1_000_000)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Positive = Annotated[float, Field(gt=0)]
Minutes = Annotated[str, Field(pattern=r"^[1-9][0-9]*min$")]


class FrozenModel(BaseModel):
    """Base class of records whose fields cannot be assigned, and which have no other keys than their fields.

    Pydantic raises ValidationError if a record is made with an unknown key or a value of a wrong type.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


def read_as(kind: type[T], path: Path, remedy: str) -> T:
    """Return the content of the JSON file `path` as a value of the type `kind`, a class or a mapping.

    Raises UserError if the file cannot be read, is not JSON or has something else. `remedy` is the end of the
    message and says what the user can do.
    """
    try:
        return TypeAdapter(kind).validate_python(read_json(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read or is damaged ({reason(error)}); {remedy}.") from error


def reason(error: Exception) -> str:
    """Return the text of an error in one line; for a ValidationError, that of the first field."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
    return " ".join(str(error).split())[:150]


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
