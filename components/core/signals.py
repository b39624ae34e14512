"""Handlers of signals that do not raise an exception while the main thread takes or releases a lock.

Python runs the handler of a signal between two bytecode instructions of the main thread. If the handler
raises an exception in a method such as `Condition.__enter__`, which takes a lock before the caller's `with`
block begins, nothing releases the lock (https://github.com/python/cpython/issues/74174). The main thread can
then block forever when it takes this lock again, for example to put a message into a queue for another
thread.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

# Seconds after which a signal is sent again that had no effect, and the most times in a row that this happens
# because of a lock.
AGAIN_SECONDS = 0.1
MOST_DEFERRALS = 50
# Functions, and modules with functions, that take or release locks outside of a `with` or `try` statement.
LOCKING_FUNCTIONS = ("__enter__", "__exit__", "acquire", "release")
LOCKING_MODULES = ("logging",)

Handler = Callable[[int, FrameType | None], object]


class Terminated(SystemExit):
    """Exception that the handler of SIGTERM raises, so that a command ends its child processes and cleans up.

    The message for the user is printed by the command and not by the handler, because the handler may
    interrupt another print. The attribute `signal` is SIGTERM, under the name that it has in Prefect's
    TerminationSignal.
    """

    signal = signal.SIGTERM


def handle_signals() -> None:
    """Make SIGTERM raise Terminated, and send SIGTERM and SIGINT again where Python drops their exception.

    Python drops, for instance, an exception that a handler raises during `__del__`. Terminated has the exit
    code 143. While the main thread takes or releases a lock, Terminated is not raised, and SIGTERM is sent
    again after AGAIN_SECONDS (`outside_of_locks`).
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated(128 + number)

    signal.signal(signal.SIGTERM, outside_of_locks(terminate))
    sys.unraisablehook = _send_ignored_again


def _send_ignored_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Send a signal once more if the exception that its handler raised was ignored; report other exceptions.

    `unraisable` is the argument of `sys.unraisablehook`. Python ignores an exception where none can be
    raised, for instance in `__del__`, in a weak reference's callback, and in some C code. The signal is sent
    by another thread after AGAIN_SECONDS, when such code has usually ended. Nothing is sent while the
    interpreter ends.
    """
    is_interrupt = issubclass(unraisable.exc_type, KeyboardInterrupt)
    number = signal.SIGINT if is_interrupt else getattr(unraisable.exc_value, "signal", None)
    if number is None:
        sys.__unraisablehook__(unraisable)
    elif not sys.is_finalizing():  # while the interpreter ends, no thread can start
        send_again(number)


def send_again(number: int) -> None:
    """Send the signal `number` to this process after AGAIN_SECONDS, from another thread."""
    timer = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def outside_of_locks(handler: Handler) -> Handler:
    """Return a handler that calls `handler`, or sends the signal again if a lock is being taken or released.

    A lock counts as being taken or released if the interrupted function is one of LOCKING_FUNCTIONS or in one
    of LOCKING_MODULES. Then `handler` is not called, and the signal is sent again after AGAIN_SECONDS. After
    MOST_DEFERRALS such signals in a row, `handler` is called in any case, because the lock may never be free.
    """
    deferrals = 0

    def handle(number: int, frame: FrameType | None) -> object:
        nonlocal deferrals
        if frame is not None and _is_locking(frame) and deferrals < MOST_DEFERRALS:
            deferrals += 1
            send_again(number)
            return None
        deferrals = 0
        return handler(number, frame)

    return handle


def _is_locking(frame: FrameType) -> bool:
    return frame.f_code.co_name in LOCKING_FUNCTIONS or frame.f_globals.get("__name__") in LOCKING_MODULES


@contextlib.contextmanager
def sigterm_outside_of_locks() -> Iterator[None]:
    """Pass the present handler of SIGTERM through `outside_of_locks` while the `with` block runs.

    At the end of the block the present handler is set again. In threads other than the main thread, and if
    the present handler is not a Python function, nothing is changed.
    """
    previous = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    signal.signal(signal.SIGTERM, outside_of_locks(previous))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
