"""The task_filter: which composed tasks become training tasks, and the reason for every one that does not (DESIGN §6).

The first look costs nothing and runs nothing: contract, hostile source, labels, duplicates, contamination. The second is
the judge's admission, which executes the task in the sandbox: it runs in eager mode, is deterministic, its outputs differ
between inputs, cheap cheats fail on it, and its eager time lies in the profile's window.
"""

from __future__ import annotations

import math
import re
from typing import Any

from components.core.config import Data
from components.core.errors import UserError
from components.core.files import digest_bytes
from components.core.task import KernelTask, check_contract, normalise
from components.judge.verdict import Admission
from components.synthesis.contamination import EvaluationPrograms, graph_digest
from components.synthesis.source_checks import hostile, mislabelled

UNEQUAL = re.compile(r"eager: (max_error|rms_error|finite_mask|wrong_values)\b")
"""The judge's words for a task that ran twice on equal inputs and gave two answers."""

LEAST_SPREAD = 1e-3
"""Of an output, as a share of its magnitude: attention before any training, then a polynomial, is -2 nearly everywhere. The tolerance
of the judge tells such an answer from a constant, but little of what is computed matters to it."""


class TaskFilter:
    """Remembers what it has seen, so candidates must be shown in the order of composition."""

    def __init__(self, data: Data):
        self.data = data
        self.programs = EvaluationPrograms(data.against)
        self.seen: dict[str, str] = {}
        """Digest of a source or of an operator graph, and the task that had it first."""
        self.nearest_programs: dict[str, tuple[float, str]] = {}
        """Highest similarity to an evaluation program and that program, by task, for every candidate held against them."""

    def check_source(self, task: KernelTask) -> tuple[str, str]:
        """Reason and detail why the task is refused before anything runs; empty strings when nothing speaks against it."""
        try:
            check_contract(task.code, "candidate")
            return self._look(task)
        except UserError as error:
            return "contract", str(error)
        except RecursionError:
            return "contract", "expressions are nested too deeply to be read"

    def _look(self, task: KernelTask) -> tuple[str, str]:
        foreign = hostile(task.code)
        if foreign:
            return "hostile", foreign
        wrong = mislabelled(task.ops, task.data_source, task.code)
        if wrong:
            return "mislabelled", wrong
        source, operators = digest_bytes(normalise(task.code).encode()), graph_digest(task.code)
        for kind, digest in (("duplicate_source", source), ("duplicate_graph", operators)):
            if digest in self.seen:
                self.seen.setdefault(source, self.seen[digest])
                return kind, f"as {self.seen[digest]}"
        self.seen[source] = self.seen[operators] = task.name or task.task_id
        if self.programs.programs:
            found = self.nearest_programs[task.task_id] = self.programs.nearest(task.code)
            if found[0] > self.data.max_similarity:
                return "similar_to_evaluation", f"{found[0]:.3f} to {found[1]}"
        return "", ""

    def check_admission(self, admission: Admission) -> tuple[str, str]:
        """Reason and detail why an executed task is refused; empty strings for an admitted one."""
        if not admission.admitted:
            detail = str(admission.evidence.get("detail", ""))
            unequal = admission.reason == "does_not_run" and UNEQUAL.match(detail)
            return "not_deterministic" if unequal else admission.reason or "not_admitted", detail
        seconds = admission.evidence["eager_seconds"]
        low, high = self.data.eager_seconds
        if not low <= seconds <= high:
            return "eager_time", f"{seconds:.6f} s is outside [{low:g}, {high:g}]"
        spread = admission.evidence.get("spread", math.inf)
        if spread <= LEAST_SPREAD:
            return "hardly_varies", f"its output's standard deviation is {spread:.1e} of its mean magnitude"
        return "", ""

    def similarity_evidence(self, task: KernelTask) -> dict[str, Any]:
        """What the evidence says of evaluation programs: nothing where there are none to stay clear of."""
        if task.task_id not in self.nearest_programs:
            return {}
        similarity, program = self.nearest_programs[task.task_id]
        return {"nearest": {"similarity": round(similarity, 4), "program": program}}
