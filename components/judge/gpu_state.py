"""Clocks, temperature and throttling of the judge's GPU, as NVML reports them (nvidia-ml-py)."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml
import torch

from components.core.records import Device

Result = TypeVar("Result")

# What slows a GPU down for a reason outside of the kernels that run on it, by the bit of NVML.
SLOWDOWNS = {
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "temperature",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "temperature (hardware)",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
}
# The limit of power, which kernels that use the whole GPU reach on their own.
REASONS = SLOWDOWNS | {pynvml.nvmlClocksEventReasonSwPowerCap: "power limit"}

# Number of times that a measurement is repeated in which the GPU was slowed down.
REPEATS = 1


@functools.cache
def _handle() -> Any:
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")


def gpu_state() -> dict[str, Any]:
    """Return the state of this process's first GPU as a dict, which is empty if NVML reports an error.

    `sm_mhz` and `memory_mhz` are the clocks of the multiprocessors and of the memory in MHz, and `celsius` is
    the temperature. `lowered_by` is the list of the reasons for which the clocks are lower than they could
    be, as texts from `REASONS`, such as `temperature` or `power limit`.
    """
    try:
        gpu = _handle()
        bits = pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
        return {
            "sm_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
            "memory_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
            "celsius": pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
            "lowered_by": [name for bit, name in REASONS.items() if bits & bit],
        }
    except pynvml.NVMLError:
        return {}


def was_slowed(*states: dict[str, Any]) -> bool:
    """Return whether the GPU was slowed down in one of `states`, each of which is a result of `gpu_state`.

    The reasons that count are those of `SLOWDOWNS`, such as the temperature. The limit of power does not
    count, because kernels that use the whole GPU reach it on their own. An empty state counts as not slowed
    down.
    """
    return any(not set(SLOWDOWNS.values()).isdisjoint(state.get("lowered_by", ())) for state in states)


def steady(measure: Callable[[], Result], device: Device) -> tuple[Result, dict[str, Any]]:
    """Call `measure`, and return its result and the states of the GPU before and after the call.

    If the GPU is slowed down before or after the call (`was_slowed`), the call is repeated, at most `REPEATS`
    times, and result and states are those of the last call. The second item of the returned pair has a result
    of `gpu_state` under `before` and under `after`. It is empty on cpu, or if NVML reports an error.
    """
    for _ in range(1 + REPEATS):
        before = gpu_state() if device == "cuda" else {}
        result = measure()
        after = gpu_state() if before else {}
        if not was_slowed(before, after):
            break
    return result, {"before": before, "after": after} if before else {}
