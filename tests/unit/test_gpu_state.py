"""The state of a GPU in a verdict's evidence, and the repetition of rounds in which it was slowed down."""

from typing import Any

import pynvml
import pytest

from components.judge import gpu_state as gpu_states
from components.judge.gpu_state import REPEATS, gpu_state, steady, was_slowed

COOL: dict[str, Any] = {"sm_mhz": 1980, "memory_mhz": 2619, "celsius": 45, "lowered_by": []}
HOT = COOL | {"sm_mhz": 1200, "celsius": 89, "lowered_by": ["temperature"]}


def test_without_nvml_there_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(gpu_states, "_handle", missing)
    assert gpu_state() == {} and not was_slowed({})


def test_the_reasons_of_nvml_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    answers = {
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: bits | pynvml.nvmlClocksEventReasonGpuIdle,
        "nvmlDeviceGetClockInfo": lambda _, kind: {pynvml.NVML_CLOCK_SM: 1500}.get(kind, 2619),
        "nvmlDeviceGetTemperature": lambda *_: 88,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.setattr(gpu_states, "_handle", lambda: None)
    assert gpu_state() == {
        "sm_mhz": 1500,
        "memory_mhz": 2619,
        "celsius": 88,
        "lowered_by": ["temperature (hardware)", "power limit"],
    }
    assert was_slowed(COOL, gpu_state())
    # A kernel that uses the whole GPU reaches its limit of power on its own.
    assert not was_slowed(COOL, COOL | {"lowered_by": ["power limit"]})


def rounds_with(
    monkeypatch: pytest.MonkeyPatch, states: list[dict[str, Any]], device: Any = "cuda"
) -> tuple[int, dict[str, Any]]:
    """Return how often the rounds were made while the GPU was in `states` in turn, and the evidence."""
    made: list[int] = []

    def measure() -> int:
        made.append(len(made) + 1)
        return made[-1]

    monkeypatch.setattr(gpu_states, "gpu_state", lambda: states.pop(0))
    last, evidence = steady(measure, device)
    assert last == made[-1] and not states
    return last, evidence


def test_rounds_of_a_gpu_that_was_slowed_down_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rounds_with(monkeypatch, [COOL, COOL]) == (1, {"before": COOL, "after": COOL})
    assert rounds_with(monkeypatch, [COOL, HOT, COOL, COOL]) == (2, {"before": COOL, "after": COOL})
    lasting = [HOT] * 2 * (1 + REPEATS)
    assert rounds_with(monkeypatch, lasting) == (1 + REPEATS, {"before": HOT, "after": HOT})
    assert rounds_with(monkeypatch, [{}]) == (1, {})
    assert rounds_with(monkeypatch, [], "cpu") == (1, {})
