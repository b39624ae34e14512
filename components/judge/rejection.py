"""Conversion of a candidate's failures into the status, reason and log of its verdict."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from components.judge.verdict import Status
from components.sandbox.runner_process import RunnerError

# Pattern of the runner messages that may appear in a verdict after the runner has received timed inputs. Any
# other message is replaced by `HIDDEN`, because a candidate could put answers into its message for other
# candidates of the task, whose inputs are mixed from the same sets.
PLAIN_REASON = re.compile(
    "wrong_number_of_outputs|not_a_plain_tensor|output_aliases_input|unreadable_output|output_is_mapped"
    "|wrong_(?:shape|dtype|device)|torch_compute"
)
HIDDEN = "it failed in a timed call, having passed verification"

# Status, reason and log of a verdict, in which `{text}` is replaced by the runner's message.
Rejection = tuple[Status, str, str]

# Rejections by the kind of the RunnerError, for errors that are raised while the candidate is called.
RUN_ERRORS: dict[str, Rejection] = {
    "crashed": ("crashed", "process_died", "{text}"),
    "timed_out": ("timed_out", "run_limit", "{text}"),
    "out_of_memory": ("out_of_memory", "memory_limit", "{text}"),
    "error": ("crashed", "exception", "{text}"),
    "protocol": ("crashed", "protocol", "{text}"),
    "wrong": ("wrong_output", "{text}", "the output has not the reference's form: {text}"),
    "forbidden": ("forbidden", "{text}", "computing with torch is forbidden: {text}"),
}
# Rejections by the kind of the RunnerError, for errors that are raised while the candidate is loaded. No
# output exists yet while a candidate is loaded. The kinds `wrong` and `forbidden`, which are errors of a
# call, are therefore reported as crashes.
LOAD_ERRORS: dict[str, Rejection] = RUN_ERRORS | {
    "error": ("load_failed", "import", "{text}"),
    "wrong": ("crashed", "wrong", "{text}"),
    "forbidden": ("crashed", "forbidden", "{text}"),
}


@dataclass(eq=False)
class Rejected(Exception):
    """Exception for a candidate that fails, with the status, reason and log of its verdict."""

    status: Status
    reason: str
    log: str


@contextlib.contextmanager
def rejecting(errors: Mapping[str, Rejection], *, hide_text: bool = False) -> Iterator[None]:
    """Convert a RunnerError raised inside the context into Rejected, as `errors` defines for its kind.

    A kind without an entry gets the status `crashed`. If `hide_text` is set, only the part of the runner's
    message that matches `PLAIN_REASON` is used; a message without a match is replaced by `HIDDEN`.
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
