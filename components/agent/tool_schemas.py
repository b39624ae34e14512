"""Validate the names and arguments of tool calls, and describe the tools to the policy as JSON schemas.

The docstring of each class in `TOOLS` is the description of the tool that the policy reads.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError


def _decoded(value: Any) -> Any:
    """Return the value that the JSON text `value` encodes, or `value` itself if it is not a JSON text.

    This is needed because a call whose arguments are written between tags passes lists as JSON text.
    """
    try:
        return json.loads(value)
    except (TypeError, ValueError, RecursionError):  # not text, or no JSON
        return value


class Arguments(BaseModel):
    """Base class of the arguments of a tool; arguments that the tool does not have are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


def _check_path(path: str) -> str:
    if "\0" in path or any(len(part.encode()) > 255 for part in path.split("/")):
        raise ValueError("no path: it has a NUL character or a name of more than 255 bytes")
    return path


FilePath = Annotated[
    str,
    AfterValidator(_check_path),
    Field(description="path in the workspace, for instance kernels/forward.cu"),
]


class Write(Arguments):
    """Write a whole file: model_new.py or kernels/NAME. A file that is already there must have been read before."""

    file_path: FilePath
    content: str = Field(description="the file's whole text")


class Edit(Arguments):
    """Replace one exact piece of text in a file that you have read or written."""

    file_path: FilePath
    old_string: str = Field(
        description="the exact text to replace; it must occur once, unless replace_all is true"
    )
    new_string: str
    replace_all: bool = False


# A docstring of OneEdit or Todo would become part of the schema of their tool, which trained policies know.
class OneEdit(Arguments):
    old_string: str
    new_string: str
    replace_all: bool = False


class MultiEdit(Arguments):
    """Several edits of one file, one after another; if any of them cannot be made, none is."""

    file_path: FilePath
    edits: Annotated[list[OneEdit], BeforeValidator(_decoded), Field(min_length=1)]


class Read(Arguments):
    """A file with its line numbers."""

    file_path: FilePath
    offset: int | None = Field(default=None, ge=1, description="first line")
    limit: int | None = Field(default=None, ge=1, description="number of lines")


class Bash(Arguments):
    """Run a command in a shell that keeps its directory and variables. No network. The measuring commands are
    `bash utils/compile.sh`, `python3 -m utils.verification` and `python3 -m utils.profiling`."""

    command: str
    timeout: int | None = Field(
        default=None, ge=1, description="limit in milliseconds; 120000 unless given, at most 600000"
    )
    run_in_background: bool = Field(
        default=False, description="return at once; read the output with BashOutput"
    )
    description: str | None = None


class BashOutput(Arguments):
    """What a background command has said since it was last asked, and whether it still runs."""

    bash_id: str


class KillBash(Arguments):
    """End a background command."""

    shell_id: str


class Glob(Arguments):
    """Paths that match a pattern such as kernels/*.cpp or **/*.py."""

    pattern: str
    path: str | None = Field(default=None, description="folder to look in")


class Grep(Arguments):
    """Search files for a Perl regular expression."""

    pattern: str
    path: str | None = Field(default=None, description="file or folder to search")
    glob: str | None = Field(default=None, description="only files whose names match, for instance *.cu")
    output_mode: Literal["content", "files_with_matches", "count"] = "files_with_matches"
    ignore_case: bool = Field(default=False, alias="-i")
    line_numbers: bool = Field(default=True, alias="-n")
    after: int | None = Field(default=None, ge=0, alias="-A")
    before: int | None = Field(default=None, ge=0, alias="-B")
    context: int | None = Field(default=None, ge=0, alias="-C")
    head_limit: int | None = Field(default=None, ge=1, description="only the first lines of the result")


class Todo(Arguments):
    content: str
    status: Literal["pending", "in_progress", "completed"]


class TodoWrite(Arguments):
    """Replace your list of what is to be done."""

    todos: Annotated[list[Todo], BeforeValidator(_decoded)]


TOOLS: dict[str, type[Arguments]] = {
    kind.__name__: kind
    for kind in (Write, Edit, Read, Bash, BashOutput, KillBash, MultiEdit, Glob, Grep, TodoWrite)
}


def validated(name: str, values: dict[str, Any]) -> Arguments | str:
    """Return `values` as the arguments of the tool `name`, or a clause that says what is wrong with them.

    `values` has the arguments of a call by name. An unknown tool, too, gives such a clause.
    """
    if (kind := TOOLS.get(name)) is None:
        return f"no tool is called {name[:40]}; there are {', '.join(TOOLS)}"
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        mistakes = error.errors(include_url=False, include_input=False)
        missing = [
            str(one["loc"][0]) for one in mistakes if one["type"] == "missing" and len(one["loc"]) == 1
        ]
        if missing:
            return f"{name} needs {', '.join(missing)}"
        return f"{name}: {'.'.join(map(str, mistakes[0]['loc']))}: {mistakes[0]['msg']}"


def descriptions() -> list[Any]:
    """Return the tools as dicts in the form that chat templates and OpenAI-compatible servers take.

    Each has a name, a description, and the JSON schema of the arguments.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": " ".join((kind.__doc__ or "").split()),
                "parameters": kind.model_json_schema(by_alias=True),
            },
        }
        for name, kind in TOOLS.items()
    ]
