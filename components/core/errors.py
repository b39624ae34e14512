"""Exceptions that commands turn into one sentence and an exit code.

Imports no package, so that help is instant.
"""

from __future__ import annotations

from collections.abc import Iterator


class UserError(Exception):
    """An error that the user must mend. Exit code 2.

    The message is one sentence: what is wrong, in which file or field, and how to mend it.
    """


class IsolationUnavailable(UserError):
    """No sandbox can be made on this machine. Exit code 3."""


class InfrastructureError(Exception):
    """The judge itself failed: the job is tried again and never charged to the candidate."""


class TaskError(Exception):
    """The task's own source fails: it is refused at admission, and no candidate is blamed for it.

    `out_of_memory` says that its runner ran out of memory.
    """

    def __init__(self, text: str, *, out_of_memory: bool = False):
        super().__init__(text)
        self.out_of_memory = out_of_memory


class StageFailed(Exception):
    """A training stage whose result must not be used: one sentence with the figure that fell short."""


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then the one that it was raised from, and so on back to the first one.

    That is an error's cause or, without one, its context.
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
