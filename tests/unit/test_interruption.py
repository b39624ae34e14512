"""Tests of signals that arrive while pydantic serialises an object."""

import signal

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
