"""Exceptions of the project, and functions that raise UserError and follow the causes of an exception.

This module imports no other module of the project, so that `--help` is fast.
"""

from collections.abc import Iterator


class UserError(Exception):
    """An error that the user can fix.

    The message is one sentence that says what is wrong, in which file or field, and how to fix it.
    `exit_code` is the exit code of a command that raises the error.
    """

    exit_code = 2


class IsolationUnavailable(UserError):
    """Error raised if this machine cannot isolate candidates, the kernels that are judged, in the sandbox.

    A command that raises it ends with the exit code 3.
    """

    exit_code = 3


class InfrastructureError(Exception):
    """A failure of the judge itself, and not of the candidate, the kernel that it judges.

    The candidate is judged again, up to `sandbox.attempts` (a parameter) times in all. If the judge fails
    each time, the trajectory that made the candidate has no reward (None) instead of a low one.
    """


class TaskError(Exception):
    """A failure of the source of a task, the PyTorch module that kernels are to make faster.

    Such a task is not admitted to a data set. The failure is never treated as one of a candidate, a kernel
    that is judged on the task. `out_of_memory` is true if the runner, the sandboxed process that executes the
    source, ran out of memory.
    """

    def __init__(self, text: str, *, out_of_memory: bool = False):
        super().__init__(text)
        self.out_of_memory = out_of_memory


class TaskTooLarge(TaskError):
    """Error raised if judging kernels on a task takes more memory than the device or the machine has.

    Nothing was measured, and another try would not help.
    """


class StageFailed(Exception):
    """A failure of a stage (a step of the pipeline, or an evaluation) whose result must not be used.

    The message is one sentence with the reason, such as a figure that is too low. `exit_code` is the exit
    code of a command that raises the error.
    """

    exit_code = 1


def refuse(*faults: tuple[object, str]) -> None:
    """Raise UserError with the message of the first fault that is found; do nothing if none is.

    Each fault is a pair: a value that is true if the fault is found, and the message.
    """
    for is_found, message in faults:
        if is_found:
            raise UserError(message)


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, then its cause, then the cause of the cause, and so on.

    If an error has no explicit cause (`raise … from`), the next one is its context, that is, the exception
    that was handled when it was raised, also after `from None`. The chain ends before an error that was
    yielded already. Nothing is yielded for None.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
