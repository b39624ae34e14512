"""Comparison of timed calls with float64 outputs that a runner of the task's own source computes."""

import secrets
import signal
import time

import torch

from components.core.errors import InfrastructureError
from components.judge.correctness import TIMED_MULTIPLE, ReferenceOutput
from components.judge.input_mixing import InputMix
from components.judge.role_processes import ProcessPerRole
from components.judge.task_reference import TaskReference, first_mismatch
from components.sandbox import shared_memory
from components.sandbox.runner_process import Runner, RunnerError
from components.sandbox.runner_protocol import RegionName, RoleHeader
from components.sandbox.shared_memory import Buffer


def suspicious_calls(departures: list[float], mixes: list[InputMix]) -> list[int]:
    """Return the calls of a round whose outputs must be compared with float64 outputs, at most three.

    `departures` has the departure of each call from eager (`correctness.departures`). Calls with a departure
    of at most 1 are right. Of the others, the result has the one that departs most among the calls with
    inputs of the distribution `given`, a random one of the rest of them, and the one that departs most among
    the calls with inputs of another distribution.

    The random call is needed where eager itself is inexact in some calls: a candidate could otherwise be
    wrong in many calls as long as it departs more from eager, correctly, in another one.
    """
    flagged = sorted(
        (i for i, figure in enumerate(departures) if not figure <= 1), key=departures.__getitem__
    )
    given = [i for i in flagged if mixes[i].distribution == "given"]
    others = [i for i in flagged if mixes[i].distribution != "given"]
    rest = [secrets.choice(given[:-1])] if len(given) > 1 else []
    return given[-1:] + rest + others[-1:]


class ExactRunner:
    """Runner that computes float64 outputs for the inputs of single timed calls.

    It is started at the first use, and stopped (SIGSTOP) whenever it does not compute. Its memory, which has
    copies of the parameters and of one call's inputs, is shared with no other runner. Its methods may be
    called only while no runner of a candidate works.
    """

    def __init__(self, reference: TaskReference, processes: ProcessPerRole):
        self.reference = reference
        self.processes = processes
        self.runner: Runner | None = None
        self.buffers: dict[RegionName, Buffer] = {}

    def wrong_call(
        self,
        mixes: list[InputMix],
        inputs: torch.Tensor,
        results: torch.Tensor,
        eager_results: torch.Tensor,
    ) -> str | None:
        """Return the reason why a call of a timed round is wrong, or None if no call was found to be wrong.

        The tensors of bytes hold the inputs of `mixes`, the candidate's results and eager's results, one call
        after another. The reason ends with the name of the input distribution. Raises TaskError if eager is
        too inexact to tell, and InfrastructureError if the float64 outputs cannot be computed.
        """
        layout, params = self.reference.layout, self.reference.params
        figures = self.reference.departures(results, eager_results, len(mixes))
        for index in suspicious_calls(figures, mixes):
            expected = self.outputs(inputs.view(len(mixes), -1)[index])
            references = [
                ReferenceOutput(single.view(exact.shape), exact, params.sandbox, params.precision)
                for single, exact in zip(layout.outputs.views(eager_results, index), expected, strict=True)
            ]
            outputs = layout.outputs.views(results, index)
            reason = first_mismatch(references, outputs, mixes[index].distribution, multiple=TIMED_MULTIPLE)
            if reason is not None:
                return reason
        return None

    def outputs(self, inputs: torch.Tensor) -> list[torch.Tensor]:
        """Return the float64 outputs for the inputs of one call, which are given as bytes.

        The result is overwritten by the next use. Raises InfrastructureError if the runner fails.
        """
        scheduler, seconds = self.reference.scheduler, self.reference.params.sandbox.run_seconds
        try:
            with scheduler.measuring():  # nothing else uses a GPU meanwhile
                runner = self.runner or self._start()
                self.buffers["inputs"].raw()[: inputs.numel()].copy_(inputs)
                if self.reference.params.device == "cuda":
                    torch.cuda.synchronize()
                runner.deadline = time.monotonic() + seconds
                with scheduler.background_work(runner):
                    runner.request({"op": "exact"})
                runner.signal(signal.SIGSTOP)
        except (RunnerError, torch.OutOfMemoryError) as error:
            self.close()  # the next use starts another runner
            raise InfrastructureError(f"reference in float64: {error}") from error
        return self.reference.layout.expected.tensors(self.buffers["expected"], 0)

    def _start(self) -> Runner:
        reference, layout = self.reference, self.reference.layout
        sizes: dict[RegionName, int] = {
            "parameters": layout.parameters.stride,
            "inputs": layout.inputs.stride,
            "expected": layout.expected.stride,
        }
        for name, size in sizes.items():
            self.buffers[name] = shared_memory.make_buffer(reference.params.device, size)
        self.buffers["parameters"].raw().copy_(reference.parameters.raw())
        header: RoleHeader = {
            "role": "reference",
            "code": reference.code,
            "precision": reference.params.precision,
            "init_inputs": layout.description.init_inputs,
            "layout": layout.header(1, self.buffers),
        }
        descriptors = tuple(buffer.fd for buffer in self.buffers.values())
        seconds = reference.params.sandbox.run_seconds
        self.runner = self.processes.start(header, descriptors, seconds=seconds)
        self.runner.receive()
        return self.runner

    def close(self) -> None:
        """End the runner and free its memory."""
        with self.reference.scheduler.preparing():  # freeing device memory blocks the whole device
            if self.runner is not None:
                self.runner.close()
                self.runner = None
            for buffer in self.buffers.values():
                buffer.close()
            self.buffers.clear()
