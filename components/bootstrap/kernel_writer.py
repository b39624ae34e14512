"""The rule-based kernel writer: it turns a chain of operators and a schedule into the text of a kernel."""

from components.bootstrap.chain_parser import OperatorChain
from components.bootstrap.kernel_templates_cpu import write_cpu_kernel
from components.bootstrap.kernel_templates_cuda import write_cuda_kernel
from components.bootstrap.schedules import CpuSchedule, Schedule


def write_kernel(chain: OperatorChain, schedule: Schedule) -> str | None:
    """Return the text of kernels/forward.cpp (or .cu) for the chain according to the schedule.

    Returns None if the chain has an operator for which there is no kernel on the schedule's device.
    """
    if isinstance(schedule, CpuSchedule):
        return write_cpu_kernel(chain, schedule)
    return write_cuda_kernel(chain, schedule)
