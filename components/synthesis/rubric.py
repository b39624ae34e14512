"""The rubric: which composed tasks become training tasks, and the reason for every one that does not (DESIGN §6).

The first look costs nothing and runs nothing: contract, duplicates, contamination. The second is the judge's admission,
which executes the task in the sandbox: it runs in eager mode, is deterministic, its outputs differ between inputs, cheap
cheats fail on it, and its eager time lies in the profile's window.
"""

from __future__ import annotations

from components.config import BadInput, Data
from components.files import digest_bytes
from components.sandbox.judge import Admission
from components.synthesis.contamination import Programs, graph
from components.task import KernelTask, check_contract, normalise


class Rubric:
    """Remembers what it has seen, so candidates must be shown in the order of composition."""

    def __init__(self, data: Data):
        self.data = data
        self.programs = Programs(data.against)
        self.seen: set[str] = set()

    def look(self, task: KernelTask) -> tuple[str, str]:
        """Reason and detail why the task is refused before anything runs; empty strings when nothing speaks against it."""
        try:
            check_contract(task.code, "candidate")
        except BadInput as error:
            return "contract", str(error)
        source, operators = digest_bytes(normalise(task.code).encode()), graph(task.code)
        duplicate = "duplicate_source" if source in self.seen else "duplicate_graph" if operators in self.seen else ""
        self.seen |= {source, operators}
        if duplicate:
            return duplicate, ""
        similarity, origin = self.programs.nearest(task.code)
        if similarity > self.data.max_similarity:
            return "similar_to_evaluation", f"{similarity:.3f} to {origin}"
        return "", ""

    def weigh(self, admission: Admission) -> tuple[str, str]:
        """Reason and detail why an executed task is refused; empty strings for an admitted one."""
        if not admission.admitted:
            return admission.reason or "not_admitted", str(admission.evidence.get("detail", ""))
        seconds = admission.evidence["eager_seconds"]
        low, high = self.data.eager_seconds
        if not low <= seconds <= high:
            return "eager_time", f"{seconds:.6f} s is outside [{low:g}, {high:g}]"
        return "", ""
