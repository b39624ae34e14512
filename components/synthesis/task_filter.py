"""Decide which proposed tasks, called candidates, may enter a data set, with the reason for each refusal.

A task is a PyTorch module that a policy has to make faster. `check_source` decides without executing the
source: whether it has the parts of a task, forbidden code, wrong labels (`ops` and `data_source`),
duplicates, and similarity to evaluation programs, which are sources of benchmark tasks (contamination.py).
`check_admission` decides by the result of the judge's admission, in which the task was executed in the
sandbox. An admitted task is deterministic, its outputs depend on its inputs, trivial answers to it are found
wrong, and its eager time lies within data.eager_seconds.
"""

import ast
import math
import re
import sys
from collections.abc import Sequence
from typing import Any

from components.bootstrap.operator_chain import BY_NAME, canonical
from components.bootstrap.tensor_operators import uses_operator
from components.core.errors import UserError
from components.core.files import digest_bytes
from components.core.params import Data
from components.core.task import KernelTask, check_contract, normalise
from components.core.text import parse_python
from components.judge.verdict import Admission
from components.synthesis.contamination import EvaluationPrograms, graph_digest

# Pattern of an admission's detail if the eager outputs of two runs on equal inputs differed.
NOT_DETERMINISTIC = re.compile(r"eager: (max_error|rms_error|finite_mask|wrong_values)\b")

# Least standard deviation of an output, relative to the mean magnitude of the output.
MIN_SPREAD = 1e-3


class TaskFilter:
    """A filter that refuses candidates (tasks proposed for a data set) and says why.

    It refuses a task because of its source, or because of the result of the judge's check (admission). It
    also refuses duplicates of candidates that it has checked before, whose digests it stores, so its results
    depend on the order of the candidates. The constructor raises UserError if data.against cannot be read.
    """

    def __init__(self, data: Data):
        self.data = data
        self.programs = EvaluationPrograms(data.against)
        # Name of the first task with each digest of a source or operator graph.
        self.seen: dict[str, str] = {}
        # Highest similarity to an evaluation program and the origin of that program, by task id.
        self.nearest_programs: dict[str, tuple[float, str]] = {}

    def check_source(self, task: KernelTask) -> tuple[str, str]:
        """Return the reason and the detail of a refusal because of the task's source, or two empty strings.

        The source is not executed. The reason is a word such as "hostile", and the detail a text for people.
        The digests of a source without faults are stored, so that later duplicates of it are refused.
        """
        try:
            check_contract(task.code, "candidate")
            return self._find_refusal(task)
        except UserError as error:
            return "contract", str(error)
        except RecursionError:
            return "contract", "expressions are nested too deeply to be read"

    def _find_refusal(self, task: KernelTask) -> tuple[str, str]:
        if forbidden := find_forbidden(task.code):
            return forbidden
        if label_error := find_label_error(task.ops, task.data_source, task.code):
            return "mislabelled", label_error
        source, operators = digest_bytes(normalise(task.code).encode()), graph_digest(task.code)
        for kind, digest in (("duplicate_source", source), ("duplicate_graph", operators)):
            if digest in self.seen:
                self.seen.setdefault(source, self.seen[digest])
                return kind, f"as {self.seen[digest]}"
        self.seen[source] = self.seen[operators] = task.name or task.task_id
        if self.programs.programs:
            nearest = self.nearest_programs[task.task_id] = self.programs.nearest(task.code)
            if nearest[0] > self.data.max_similarity:
                return "similar_to_evaluation", f"{nearest[0]:.3f} to {nearest[1]}"
        return "", ""

    def check_admission(self, admission: Admission) -> tuple[str, str]:
        """Return the reason and detail of a refusal because of the judge's admission, or two empty strings.

        An admission is the result of the check whether kernels for a task can be judged. A task is refused if
        the judge did not admit it, if its eager time is outside data.eager_seconds, or if its output's
        standard deviation is at most MIN_SPREAD of the output's mean magnitude. The reason is a word such as
        "eager_time", and the detail a text for people.
        """
        if not admission.admitted:
            detail = str(admission.evidence.get("detail", ""))
            unequal = admission.reason == "does_not_run" and NOT_DETERMINISTIC.match(detail)
            return "not_deterministic" if unequal else admission.reason or "not_admitted", detail
        seconds = admission.evidence["eager_seconds"]
        low, high = self.data.eager_seconds
        if not low <= seconds <= high:
            return "eager_time", f"{seconds:.6f} s is outside [{low:g}, {high:g}]"
        spread = admission.evidence.get("spread", math.inf)
        if spread <= MIN_SPREAD:
            return "hardly_varies", f"its output's standard deviation is {spread:.1e} of its mean magnitude"
        return "", ""

    def similarity_evidence(self, task: KernelTask) -> dict[str, Any]:
        """Return the origin and similarity of the evaluation program that is most similar to the task.

        An evaluation program is the source of a benchmark's task. The result is {"nearest": {"similarity": …,
        "program": …}} with a similarity from 0 to 1. It is empty if the task was not compared with any
        program.
        """
        if task.task_id not in self.nearest_programs:
            return {}
        similarity, program = self.nearest_programs[task.task_id]
        return {"nearest": {"similarity": round(similarity, 4), "program": program}}


# Modules that a task may import, including their submodules.
ALLOWED_MODULES = frozenset(
    (
        "torch math typing types collections functools itertools dataclasses enum abc numbers operator "
        "copy warnings numpy einops"
    ).split()
)
FORBIDDEN_NAMES = frozenset("eval exec compile open __import__ __builtins__ globals breakpoint".split())
FORBIDDEN_ATTRIBUTES = frozenset(
    (
        "__globals__ __builtins__ __subclasses__ __code__ __class__ __bases__ __mro__ __dict__ __loader__ "
        "__reduce__ __getattribute__"
    ).split()
)
FORBIDDEN_TORCH = re.compile(
    r"torch\.(load|save|hub|compile|ops|classes|_C|multiprocessing|distributed"
    r"|utils\.cpp_extension|cuda\.(synchronize|Event|Stream))\b|torch\.\*"
)


def find_forbidden(code: str) -> tuple[str, str] | None:
    """Return the reason and a description of the first forbidden import, name or attribute, or None.

    `code` is the source of a task and must be valid Python. The reason is "foreign_import" for a module that
    is neither permitted (ALLOWED_MODULES) nor of Python's standard library, and "hostile" for anything else.
    """
    tree = parse_python(code)
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = "." * node.level + (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                package = (origin or alias.name).partition(".")[0]
                if package not in ALLOWED_MODULES:
                    available = ", ".join(sorted(ALLOWED_MODULES))
                    reason = "hostile" if package in sys.stdlib_module_names else "foreign_import"
                    return reason, f"imports {origin or alias.name}; a task may import {available}"
                name = f"{origin}.{alias.name}" if origin else alias.name
                if FORBIDDEN_TORCH.match(name):
                    return "hostile", f"imports {name}"
                if origin or alias.asname:
                    imported[alias.asname or alias.name] = name
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if name in FORBIDDEN_NAMES:
                return "hostile", f"uses {name}"
            case ast.Attribute(attr=name) if name in FORBIDDEN_ATTRIBUTES:
                return "hostile", f"uses {name}"
            case ast.Attribute():
                first, _, rest = ast.unparse(node).partition(".")
                if FORBIDDEN_TORCH.match(name := f"{imported.get(first, first)}.{rest}"):
                    return "hostile", f"uses {name}"
    return None


def find_label_error(ops: Sequence[str], data_source: str, code: str) -> str:
    """Return a description of the first wrong label of a task, or an empty string.

    The labels are `ops`, the names of the task's operators, and `data_source`, its kind. A label is wrong if
    `ops` names an operator that is not in the source `code`, if `data_source` is torch#N and the number of
    operators is not N, or if it is torch#N or transformers and `ops` is empty.
    """
    number = re.fullmatch(r"torch#(\d+)", data_source)
    if not ops and (number or data_source == "transformers"):
        return "ops is empty"
    if number and int(number[1]) != len(ops):
        return f"{data_source} has {len(ops)} operators"
    used = {
        canonical(f".{node.id if isinstance(node, ast.Name) else node.attr}")
        for node in ast.walk(parse_python(code))
        if isinstance(node, ast.Name | ast.Attribute)
    }
    text = "".join(code.split())
    for name in ops:
        if name in BY_NAME:
            line = re.escape("".join(BY_NAME[name].line.split()))
            if re.search(re.sub(r"\\\{\d\\\}", r"[-\\d.e]+", line), text):
                continue
        if canonical(f".{name}") not in used and not uses_operator(code, name):
            return f"{name} is not in the source"
    return ""
