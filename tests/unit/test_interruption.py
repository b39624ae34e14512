"""Signals that arrive where an exception is wrapped or ignored."""

import signal
import subprocess
import sys

import pytest
from prefect.exceptions import TerminationSignal
from pydantic import BaseModel, model_serializer
from pydantic_core import PydanticSerializationError

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
from components.cli.main import handle_signals
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
        ("SIGTERM", "own", "_Terminated"),
        ("SIGTERM", "prefect", "TerminationSignal"),
        ("SIGINT", "own", "KeyboardInterrupt"),
    ],
)
def test_a_signal_whose_exception_was_ignored_is_sent_again(name: str, handler: str, raised: str) -> None:
    command = [sys.executable, "-c", IGNORED, name, handler]
    done = subprocess.run(command, capture_output=True, text=True, timeout=45, check=True)
    assert done.stdout.split("\n")[:2] == ["works on", raised] and not done.stderr


# A program that gets signals while it puts items into queues, and prints how many queues stayed locked.
PUTTING = """
import os, queue, random, signal, sys, threading, time
from components.core.signals import outside_of_locks

class Interruption(BaseException):
    pass

def interrupt(number, frame):
    if not awaited.is_set():
        awaited.set()
        raise Interruption

def take(items):
    while items.get() is not None:
        pass

def queue_with_thread():
    items = queue.Queue()
    threading.Thread(target=take, args=(items,), daemon=True).start()
    return items

awaited = threading.Event()
awaited.set()
signal.signal(signal.SIGTERM, outside_of_locks(interrupt) if sys.argv[1] == "deferred" else interrupt)
items, locked = queue_with_thread(), 0
for _ in range(int(sys.argv[2])):
    sender = threading.Timer(0.0005 + 0.001 * random.random(), os.kill, (os.getpid(), signal.SIGTERM))
    sender.start()
    deadline = time.monotonic() + 5
    try:
        awaited.clear()
        while not awaited.is_set() and time.monotonic() < deadline:
            items.put(1)
    except Interruption:
        pass
    awaited.set()
    sender.join()
    if items.mutex.acquire(timeout=0.5):
        items.mutex.release()
    else:
        items, locked = queue_with_thread(), locked + 1
    time.sleep(0.002)
print(locked)
"""


def locked_queues(how: str, signals: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PUTTING, how, str(signals)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return int(done.stdout)


def test_a_signal_never_leaves_a_queue_locked() -> None:
    assert locked_queues("deferred", 40) == 0
    assert locked_queues("at once", 30) > 0, "the program shows no locked queue without the handler"
