"""Rejection of candidates: the status, reason and log that a verdict has for each kind of failure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from components.judge.verdict import Status
from components.sandbox.runner_process import RunnerError

PLAIN_REASON = re.compile(
    "wrong_number_of_outputs|not_a_plain_tensor|output_aliases_input|unreadable_output|output_is_mapped"
    "|wrong_(?:shape|dtype|device)|torch_compute"
)
"""Messages of a runner that may be passed on after the runner has received timed inputs.

Other candidates of the task get inputs made of the same sets, and free text could carry the answers to them.
"""
HIDDEN = "it failed in a timed call, having passed verification"

Rejection = tuple[Status, str, str]
"""Status, reason and log of a verdict, in which `{text}` stands for the runner's message."""

RUN_ERRORS: dict[str, Rejection] = {
    "crashed": ("crashed", "process_died", "{text}"),
    "timed_out": ("timed_out", "run_limit", "{text}"),
    "out_of_memory": ("out_of_memory", "memory_limit", "{text}"),
    "error": ("crashed", "exception", "{text}"),
    "protocol": ("crashed", "protocol", "{text}"),
    "wrong": ("wrong_output", "{text}", "the output has not the reference's form: {text}"),
    "forbidden": ("forbidden", "{text}", "computing with torch is forbidden: {text}"),
}
"""Rejection by the kind of a RunnerError that is raised while the candidate is called."""
LOAD_ERRORS: dict[str, Rejection] = RUN_ERRORS | {
    "error": ("load_failed", "import", "{text}"),
    "wrong": ("crashed", "wrong", "{text}"),
    "forbidden": ("crashed", "forbidden", "{text}"),
}
"""Rejection by the kind of a RunnerError that is raised while the candidate is loaded and has no outputs."""


class Rejected(Exception):
    """Fault of a candidate, with the status, reason and log of its verdict."""

    def __init__(self, status: Status, reason: str, log: str):
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.reason = reason
        self.log = log


@contextlib.contextmanager
def rejecting(errors: Mapping[str, Rejection], *, hide_text: bool = False) -> Iterator[None]:
    """Convert a RunnerError to Rejected, with the entry of `errors` for its kind.

    With `hide_text` only the part of a message that matches `PLAIN_REASON` is passed on.
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
