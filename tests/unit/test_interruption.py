"""Signals that arrive where an exception is wrapped or ignored, or where a lock is being taken."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import cast

import pytest
from prefect.exceptions import TerminationSignal
from pydantic import BaseModel, model_serializer
from pydantic_core import PydanticSerializationError

from components.core import signals
from components.core.signals import sigterm_outside_of_locks
from flows.nightly import raise_interruption


class Interrupted(BaseModel):
    """A model whose serializer raises an exception, as a signal's handler may do in it."""

    number: int

    @model_serializer
    def interrupt(self) -> dict[str, int]:
        raise KeyboardInterrupt if self.number == signal.SIGINT else TerminationSignal(self.number)


def wrapped(number: int) -> Exception:
    with pytest.raises(PydanticSerializationError) as caught:
        Interrupted(number=number).model_dump()
    return caught.value


def test_sigterm_in_a_serializer_calls_the_handler_of_sigterm() -> None:
    received: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        raise_interruption(wrapped(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert received == [signal.SIGTERM]


def test_ctrl_c_in_a_serializer_stays_ctrl_c() -> None:
    with pytest.raises(KeyboardInterrupt):
        raise_interruption(wrapped(signal.SIGINT))


def test_other_errors_are_left_to_the_caller() -> None:
    raise_interruption(ValueError("not a signal"))


# A program that gets a signal in a destructor, in which Python ignores exceptions, and then works on.
IGNORED = """
import os, signal, sys, time
from components.core.signals import handle_signals
from prefect.exceptions import TerminationSignal

class Destructor:
    def __del__(self):
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
        time.sleep(0.01)

def prefects_handler(number, frame):
    raise TerminationSignal(number)

handle_signals()
if sys.argv[2] == "prefect":
    signal.signal(signal.SIGTERM, prefects_handler)
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    Destructor()
    print("works on", flush=True)
    time.sleep(50)
except BaseException as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("name", "handler", "raised"),
    [
        ("SIGTERM", "own", "Terminated"),
        ("SIGTERM", "prefect", "TerminationSignal"),
        ("SIGINT", "own", "KeyboardInterrupt"),
    ],
)
def test_a_signal_whose_exception_was_ignored_is_sent_again(name: str, handler: str, raised: str) -> None:
    command = [sys.executable, "-c", IGNORED, name, handler]
    done = subprocess.run(command, capture_output=True, text=True, timeout=45, check=True)
    assert done.stdout.split("\n")[:2] == ["works on", raised] and not done.stderr


class Interruption(BaseException):
    """Exception of the handlers of SIGTERM below."""


def interrupt(number: int, frame: FrameType | None) -> None:
    raise Interruption


class SignallingLock:
    """A lock that sends SIGTERM to this process between being taken and the caller's `with` block."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.acquire, self.release = self.lock.acquire, self.lock.release

    def __enter__(self) -> None:
        self.lock.acquire()
        os.kill(os.getpid(), signal.SIGTERM)

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def queue_with_signal() -> queue.Queue[int]:
    """Return a queue whose `put` receives SIGTERM when it has just locked the queue."""
    items: queue.Queue[int] = queue.Queue()
    lock = SignallingLock()
    items.mutex, items.not_empty = lock.lock, threading.Condition(lock.lock)
    items.not_full = threading.Condition(cast(threading.Lock, lock))
    return items


def test_sigterm_leaves_a_queue_locked_if_its_handler_raises_at_once() -> None:
    previous = signal.signal(signal.SIGTERM, interrupt)
    items = queue_with_signal()
    try:
        with pytest.raises(Interruption):
            items.put(1)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert items.mutex.locked()


def test_sigterm_is_raised_when_the_queue_is_unlocked_again() -> None:
    previous = signal.signal(signal.SIGTERM, interrupt)
    items = queue_with_signal()
    try:
        with sigterm_outside_of_locks():
            items.put(1)
            assert items.qsize() == 1 and not items.mutex.locked()
            with pytest.raises(Interruption):
                time.sleep(20)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert not items.mutex.locked()


def test_a_lock_that_is_never_free_does_not_defer_sigterm_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(signals, "send_again", sent.append)
    handle = signals.outside_of_locks(interrupt)

    def acquire() -> FrameType:
        return sys._getframe()

    for _ in range(signals.MOST_DEFERRALS):
        handle(signal.SIGTERM, acquire())
    assert sent == [signal.SIGTERM] * signals.MOST_DEFERRALS
    with pytest.raises(Interruption):
        handle(signal.SIGTERM, acquire())
