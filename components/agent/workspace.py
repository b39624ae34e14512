"""Hold the workspace of one episode, which is an attempt of a policy at a task, in memory.

A workspace has the task, the template's files, and the files of the candidate, which is the policy's
implementation of the task. The candidate begins with a `model_new.py` that has the constructor of the task's
Model and a forward that calls the kernel, if `starter` can derive this file from the task. The judge receives
the files from memory. Shell commands work on a copy of the files inside the sandbox.
"""

import ast
import fnmatch
import keyword
from typing import Any

from components.core.config import PROJECT
from components.core.task import KernelTask
from components.core.text import parse_python
from components.core.workloads import assigns_workloads, workloads_of
from components.judge.screen import FILE_NAME
from components.policy.prompts import workloads_section

TEMPLATE = PROJECT / "agent_workdir"
# Files of the template, which the policy may read but not write; the first are those outside utils/.
TEMPLATE_FILES = ("SKILL.md", "binding.cpp", "binding_registry.h", "cuda_libraries.h", "vec.h")
READ_ONLY = (
    *TEMPLATE_FILES,
    "utils/compile.sh",
    "utils/compile.py",
    "utils/verification.py",
    "utils/profiling.py",
    "utils/ask.py",
)


def plain_path(path: str) -> str | None:
    """Return `path` relative to the workspace, without the prefix /workspace/ and without empty parts.

    For example, `/workspace/kernels//a.cu` becomes `kernels/a.cu`. The workspace itself becomes the empty
    string. Returns None if the path leads out of the workspace.
    """
    path = path.strip()
    inside = path.removeprefix("/workspace/") if path != "/workspace" else "."
    parts = [part for part in inside.split("/") if part not in ("", ".")]
    return None if ".." in parts or inside.startswith("/") else "/".join(parts)


def matches_glob(path: str, pattern: str) -> bool:
    """Return whether a path matches a glob pattern, both relative to the same folder.

    The part `**` of a pattern matches any number of parts of the path; no other wildcard matches a slash.
    """
    parts = path.split("/")
    # Numbers of parts of the path that the pattern up to the present part matches.
    matched = {0}
    for wanted in pattern.split("/"):
        if wanted == "**":
            matched = set(range(min(matched), len(parts) + 1))
        else:
            matched = {
                count + 1
                for count in matched
                if count < len(parts) and fnmatch.fnmatchcase(parts[count], wanted)
            }
        if not matched:
            return False
    return len(parts) in matched


class Workspace:
    """The files of one workspace, the folder in which a policy works on a task.

    `files` holds the texts of the candidate's files by workspace path; the candidate is the policy's
    implementation of the task. The task's `model.py` and the template's files are read-only and not in
    `files`.
    """

    def __init__(self, task: KernelTask):
        self.task = task
        text = starter(task)
        self.files: dict[str, str] = {} if text is None else {"model_new.py": text}

    def writable(self, path: str) -> str | None:
        """Return the normalised path if the policy may write to it, or None.

        The policy may write the files that the judge accepts: model_new.py and files directly in kernels/.
        """
        plain = plain_path(path)
        return plain if plain is not None and FILE_NAME.fullmatch(plain) else None

    def read(self, path: str) -> str | None:
        """Return the text of the file at `path`, or None if there is no such file.

        `path` is relative to the workspace and normalised, as `plain_path` returns it.
        """
        if path == "model.py":
            return self.task.code
        if path == "SKILL.md":
            return (TEMPLATE / path).read_text() + workloads_section(self.task.code, self.task.evidence)
        if path in READ_ONLY:
            return (TEMPLATE / path).read_text()
        return self.files.get(path)

    def paths(self) -> list[str]:
        """Return the sorted paths of all files, including the read-only files."""
        return sorted({"model.py", *READ_ONLY, *self.files})


def starter(task: KernelTask) -> str | None:
    """Return a `model_new.py` whose forward calls `cuda_extension.forward(inputs…, parameters…, outputs…)`.

    A policy begins with this file. The output shapes are taken from `task.evidence`, what the judge recorded
    when it checked that the task can be judged. Returns None if the evidence has no output shapes, if a
    parameter's name is no expression, such as that of a numbered submodule, or if the arguments of forward()
    do not correspond to the inputs. Returns None also if the task names workloads (several calls of its
    get_inputs) and one expression cannot allocate an output for all of them. In these cases the policy has to
    write the whole file.
    """
    shapes = task.evidence.get("workloads", [task.evidence])
    if len(shapes) != len(workloads_of(task.code, task.name)):
        return None  # an admission that ended at one of the workloads has the shapes of that one
    found = {_starter(task.code, task.evidence | one) for one in shapes}
    return found.pop() if len(found) == 1 else None


def _starter(code: str, evidence: dict[str, Any]) -> str | None:
    """Return a `model_new.py` for the task `code` whose forward allocates outputs and calls the kernel.

    The shapes are those in `evidence`, whose keys are `inputs` and `outputs` (dicts with the list `shape`)
    and `parameters` (names in the state dict). Returns None if there are no `outputs`, if a parameter's name
    is no expression, or if the arguments of forward() do not correspond to the inputs.
    """
    if "outputs" not in evidence or any(
        not part.isidentifier() or keyword.iskeyword(part)
        for name in evidence["parameters"]
        for part in name.split(".")
    ):
        return None
    tree = parse_python(code)
    model = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model")
    forward = next(
        (node for node in model.body if isinstance(node, ast.FunctionDef) and node.name == "forward"), None
    )
    if (
        forward is None
        or forward.args.vararg
        or forward.args.kwarg
        or len(forward.args.args[1:]) != len(evidence["inputs"])
    ):
        return None
    inputs = [argument.arg for argument in forward.args.args[1:]]
    count = len(evidence["outputs"])
    outputs = ["out"] if count == 1 else [f"out{index}" for index in range(count)]
    parameters = [f"self.{name}" for name in evidence["parameters"]]
    lines = [
        *(
            f"{name} = {_allocation(output['shape'], evidence['inputs'][0]['shape'], inputs[0])}"
            for name, output in zip(outputs, evidence["outputs"], strict=True)
        ),
        f"cuda_extension.forward({', '.join([*inputs, *parameters, *outputs])})",
        f"return {', '.join(outputs)}",
    ]
    forward.body = parse_python("\n".join(lines)).body
    model.name = "ModelNew"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "Model":
            node.id = "ModelNew"
    return ast.unparse(ast.fix_missing_locations(_module(tree))) + "\n"


def _allocation(shape: list[int], input_shape: list[int], name: str) -> str:
    """Return the source of an expression that allocates an output of `shape` on the device of an input.

    `name` is the variable of the input, and `input_shape` is its shape. If the first dimensions of output and
    input are equal, the expression takes this dimension from the input, so that other batch sizes work.
    """
    if shape == input_shape:
        return f"torch.empty_like({name})"
    if shape and input_shape and shape[0] == input_shape[0]:
        return f"{name}.new_empty(({', '.join([f'{name}.size(0)', *map(str, shape[1:])])},))"
    return f"{name}.new_empty({tuple(shape)})"


def _module(tree: ast.Module) -> ast.Module:
    """Return the syntax tree of a task with an import of cuda_extension, and without some of its parts.

    Left out are the task's docstring, WORKLOADS, get_inputs and get_init_inputs.
    """
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    rest = [
        node
        for node in body
        if node not in imports
        and not assigns_workloads(node)
        and not (isinstance(node, ast.FunctionDef) and node.name in ("get_inputs", "get_init_inputs"))
    ]
    return ast.Module([*imports, *parse_python("import cuda_extension").body, *rest], [])
