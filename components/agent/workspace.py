"""The workspace of one episode: the candidate's files in memory, the starter they begin from, and what the judge says.

Files live in memory until something must run: the judge takes them as they are, and a shell command gets a copy inside
the sandbox.
"""

from __future__ import annotations

import ast

from components.core.config import PROJECT, Device
from components.core.task import KernelTask
from components.judge.verdict import Verdict

KERNEL = {"cpu": "kernels/forward.cpp", "cuda": "kernels/forward.cu"}


class StarterImpossible(Exception):
    """No starter can be written for this task's form; the agent writes model_new.py itself."""


def starter(task: KernelTask) -> str:
    """A `model_new.py` that constructs what Model constructs and calls `cuda_extension.forward(inputs…, parameters…, out…)`.

    Output shapes come from the admission's evidence; an output of the first input's leading size keeps it symbolic, so
    that another batch size works.
    """
    evidence = task.evidence
    if "outputs" not in evidence:
        raise StarterImpossible("the task has no admission evidence")
    tree = ast.parse(task.code)
    model = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model")
    forward = next(
        (node for node in model.body if isinstance(node, ast.FunctionDef) and node.name == "forward"), None
    )
    if forward is None or forward.args.vararg or forward.args.kwarg:
        raise StarterImpossible("forward() has no plain argument list")
    names = [argument.arg for argument in forward.args.args[1:]]
    if len(names) != len(evidence["inputs"]):
        raise StarterImpossible("forward() takes arguments that are no tensors")
    first = evidence["inputs"][0]["shape"]
    outs, lines = [], []
    for index, output in enumerate(evidence["outputs"]):
        name = "out" if len(evidence["outputs"]) == 1 else f"out{index}"
        shape = output["shape"]
        if shape == first:
            lines.append(f"{name} = torch.empty_like({names[0]})")
        elif shape and first and shape[0] == first[0]:
            lines.append(
                f"{name} = {names[0]}.new_empty(({', '.join([f'{names[0]}.size(0)', *map(str, shape[1:])])},))"
            )
        else:
            lines.append(f"{name} = {names[0]}.new_empty({tuple(shape)})")
        outs.append(name)
    parameters = [f"self.{name}" for name in evidence["parameters"]]
    if any(part.isdigit() for name in evidence["parameters"] for part in name.split(".")):
        raise StarterImpossible("parameters live in numbered submodules")
    lines += [
        f"cuda_extension.forward({', '.join([*names, *parameters, *outs])})",
        f"return {', '.join(outs)}",
    ]
    forward.body = ast.parse("\n".join(lines)).body
    model.name = "ModelNew"
    for node in ast.walk(model):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
            node.args = []
    words = tree.body[:1] if ast.get_docstring(tree) is not None else []
    functions = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name in ("get_inputs", "get_init_inputs")
    ]
    kept = [node for node in tree.body if node not in words and node not in functions]
    imports = [node for node in kept if isinstance(node, ast.Import | ast.ImportFrom)]
    rest = [node for node in kept if not isinstance(node, ast.Import | ast.ImportFrom)]
    module = ast.Module([*imports, *ast.parse("import cuda_extension").body, *rest], [])
    return ast.unparse(ast.fix_missing_locations(module)) + "\n"


READ_ONLY = (
    "SKILL.md",
    "binding.cpp",
    "binding_registry.h",
    "vec.h",
    "utils/compile.sh",
    "utils/compile.py",
    "utils/verification.py",
    "utils/profiling.py",
    "utils/ask.py",
)


def plain_path(path: str) -> str | None:
    """The path relative to the workspace, or None when it leads out of it."""
    path = path.strip()
    inside = path.removeprefix("/workspace/") if path != "/workspace" else "."
    parts = [part for part in inside.split("/") if part not in ("", ".")]
    return None if ".." in parts or inside.startswith("/") else "/".join(parts)


class Workspace:
    """The candidate's files by workspace path. `model.py` and everything of the template are read-only to it."""

    def __init__(self, task: KernelTask, device: Device):
        self.task = task
        self.device = device
        self.files: dict[str, str] = {}
        try:
            self.files["model_new.py"] = starter(task)
        except StarterImpossible:
            self.files.clear()

    def writable(self, path: str) -> str | None:
        """The normalised path if the candidate may write it, else None."""
        plain = plain_path(path)
        if plain is None:
            return None
        folder, _, name = plain.rpartition("/")
        return plain if plain == "model_new.py" or (folder == "kernels" and name) else None

    def read(self, path: str) -> str | None:
        """The text of a file of the workspace by its normalised path; None when there is none."""
        if path == "model.py":
            return self.task.code
        if path in READ_ONLY:
            return (PROJECT / "agent_workdir" / path).read_text()
        return self.files.get(path)

    def paths(self) -> list[str]:
        """Every file, sorted."""
        return sorted({"model.py", *READ_ONLY, *self.files})

    def candidate(self) -> dict[str, str]:
        return dict(self.files)


def microseconds(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds * 1e6:.1f} us"


def observe_build(verdict: Verdict) -> str | None:
    """What `bash utils/compile.sh` says, None when it succeeded."""
    if verdict.status == "build_failed" or (
        verdict.status == "timed_out" and verdict.reason == "build_limit"
    ):
        first = [line for line in verdict.log.splitlines() if "error" in line] or verdict.log.splitlines()[:3]
        return "Build failed: " + "\n".join(line[:200] for line in first[:3])
    return None


def observe_verification(verdict: Verdict) -> str:
    """What `python3 -m utils.verification` says."""
    if verdict.status == "correct":
        return "[PASS] verify success"
    return f"[FAIL] {verdict.status}: {verdict.reason}"


def observe_profiling(verdict: Verdict) -> str:
    """What `python3 -m utils.profiling` says: the public workspace's line, then the ratios and the milestone."""
    seconds = verdict.seconds
    ratios = [
        f"{r.estimate:.2f}x {name}"
        for name, r in (("eager", verdict.speedup.eager), ("compile", verdict.speedup.compile))
        if r is not None
    ]
    return (
        f"Torch Baseline: {microseconds(seconds.eager)}, Torch Compile: {microseconds(seconds.compile)}, CUDA Extension: {microseconds(seconds.candidate)}\n"
        f"Speed-up: {', '.join(ratios)}. Milestone: {verdict.milestone} of 3."
    )
