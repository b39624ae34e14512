"""Exceptions that commands turn into one sentence and an exit code.

This module imports no package, so that `--help` is fast.
"""

from __future__ import annotations

from collections.abc import Iterator


class UserError(Exception):
    """Error that the user must mend; its exit code is 2.

    The message is one sentence that says what is wrong, in which file or field, and how to mend it.
    """


class IsolationUnavailable(UserError):
    """Error of a machine on which no sandbox can be made; its exit code is 3."""


class InfrastructureError(Exception):
    """Failure of the judge itself.

    The job is tried again, and the candidate is never blamed.
    """


class TaskError(Exception):
    """Failure of the task's own source: it is refused at admission, and no candidate is blamed for it.

    `out_of_memory` is true when its runner ran out of memory.
    """

    def __init__(self, text: str, *, out_of_memory: bool = False):
        super().__init__(text)
        self.out_of_memory = out_of_memory


class StageFailed(Exception):
    """Failure of a training stage, whose result must not be used.

    The message is one sentence with the figure that fell short.
    """


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then its cause, then the cause of that, and so on.

    The context of an error counts as its cause when it has no explicit one.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
