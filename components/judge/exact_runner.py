"""Comparison of timed calls with float64 outputs that a runner of the task's own source computes."""

import functools
import secrets
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

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
    """Return the indices of the calls of a round that must be compared with float64 outputs, at most three.

    `departures` says how far each call's output departs from eager's (`correctness.departures`), and `mixes`
    describes each call's inputs. Calls with a departure of at most 1 are right. Of all other calls with
    inputs of the distribution `given`, the result has the one that departs most, and a random one of the
    rest. Of those with inputs of another distribution, it has the one that departs most.

    The random call is needed because eager itself can be inexact. A correct answer then departs far from
    eager, and if only the largest departure were examined, one such call would hide wrong answers in others.
    """
    flagged = sorted(
        (i for i, figure in enumerate(departures) if not figure <= 1), key=departures.__getitem__
    )
    given = [i for i in flagged if mixes[i].distribution == "given"]
    others = [i for i in flagged if mixes[i].distribution != "given"]
    rest = [secrets.choice(given[:-1])] if len(given) > 1 else []
    return given[-1:] + rest + others[-1:]


class DeferredCall(NamedTuple):
    """Timed call that is compared with float64 outputs only after the candidate has ended.

    `departure` says how far its output departs from eager's (`correctness.departures`), and `mix` describes
    its inputs. `results` and `eager_results` are the outputs of the candidate and of eager, as bytes in host
    memory.
    """

    departure: float
    mix: InputMix
    results: torch.Tensor
    eager_results: torch.Tensor


class ExactRunner:
    """Runner of the task's own source that computes the float64 output of a timed call, to check the call.

    The process is started at the first use, and stopped with SIGSTOP whenever it does not compute. Its memory
    has copies of the parameters and of one call's inputs, and no other runner can access it. The methods may
    be called only while no runner of a candidate computes.

    Only suspicious calls are checked, whose outputs differ clearly from eager's (`suspicious_calls`). They
    are checked at once if there is device memory for this runner beside the timed runners. There is none if
    the baselines of the task share buffers (`Placement.shares_buffers`). Then at most two suspicious calls of
    the candidate are kept in host memory, the one that departs most from eager and a random other one.
    `wrong_deferred_call` checks them after the timed runners have ended.
    """

    def __init__(self, reference: TaskReference, processes: ProcessPerRole):
        self.reference = reference
        self.processes = processes
        self.runner: Runner | None = None
        self.buffers: dict[RegionName, Buffer] = {}
        self.deferred: list[DeferredCall] = []
        # Number of calls that could have been deferred since the last comparison of deferred calls.
        self.deferrable = 0

    def wrong_call(
        self,
        mixes: list[InputMix],
        inputs: torch.Tensor,
        results: torch.Tensor,
        eager_results: torch.Tensor,
    ) -> str | None:
        """Return the reason why a call of a timed round is wrong, or None if no call was found to be wrong.

        `mixes` describes each call's inputs. The other arguments are tensors of bytes, which hold the inputs,
        the candidate's results and eager's results, one call after another. The reason ends with the name of
        the input distribution. Raises TaskError if eager is too inexact to tell, and InfrastructureError if
        the float64 outputs cannot be computed.
        """
        figures = self.reference.departures(results, eager_results, len(mixes))
        calls, ours, eager = (t.view(len(mixes), -1) for t in (inputs, results, eager_results))
        for index in suspicious_calls(figures, mixes):
            if self.reference.layout.placement.shares_buffers:
                self._defer(figures[index], mixes[index], ours[index], eager[index])
                continue
            expected = self.outputs(functools.partial(self._copy_inputs, calls[index]))
            reason = self._mismatch(mixes[index], ours[index], eager[index], expected)
            if reason is not None:
                return reason
        return None

    def _mismatch(
        self,
        mix: InputMix,
        results: torch.Tensor,
        eager_results: torch.Tensor,
        expected: list[torch.Tensor],
    ) -> str | None:
        """Return the reason why the results of one call are wrong, or None if they are right.

        `results` and `eager_results` are the outputs of the candidate and of eager as bytes, and `expected`
        are the float64 outputs. The reason ends with the input distribution of `mix`.
        """
        layout, params = self.reference.layout, self.reference.params
        references = [
            ReferenceOutput(
                single.view(exact.shape),
                exact,
                params.sandbox,
                params.precision,
                device=params.device,
                keep_parts=layout.keeps_references,
            )
            for single, exact in zip(layout.outputs.views(eager_results, 0), expected, strict=True)
        ]
        outputs = layout.outputs.views(results, 0)
        return first_mismatch(references, outputs, mix.distribution, multiple=TIMED_MULTIPLE)

    def _defer(
        self, departure: float, mix: InputMix, results: torch.Tensor, eager_results: torch.Tensor
    ) -> None:
        """Keep a suspicious call for a later comparison; at most two calls are kept.

        The first kept call is the one that departs most from eager. A new call that departs more becomes the
        first, and the previous first call becomes the second. Any other new call becomes the second call with
        a probability of 1/n, where n is the number of calls that were suspicious so far, or if there is no
        second call yet. `results` and `eager_results` are the outputs of the candidate and of eager, as
        bytes.
        """
        self.deferrable += 1
        is_largest = not self.deferred or not departure <= self.deferred[0].departure
        if is_largest or len(self.deferred) < 2 or secrets.randbelow(self.deferrable) == 0:
            call = DeferredCall(
                departure, mix, results.to("cpu", copy=True), eager_results.to("cpu", copy=True)
            )
            self.deferred = [call, *self.deferred[:1]] if is_largest else [self.deferred[0], call]

    def forget_deferred(self) -> None:
        """Drop all deferred calls, for example those of a candidate that failed before they were compared."""
        self.deferred, self.deferrable = [], 0

    def wrong_deferred_call(self) -> str | None:
        """Compare the deferred calls, and return the reason why one is wrong, or None if all are right.

        The timed runners of the task must have ended, and their memory must be free. The reason ends with the
        name of the input distribution. Raises TaskError if eager is too inexact to tell, and
        InfrastructureError if the float64 outputs cannot be computed.
        """
        deferred = self.deferred
        self.forget_deferred()
        try:
            for call in deferred:
                expected = self.outputs(functools.partial(self._write_inputs, call.mix))
                reason = self._mismatch(call.mix, call.results, call.eager_results, expected)
                if reason is not None:
                    return reason
            return None
        finally:
            self.close()

    @staticmethod
    def _copy_inputs(inputs: torch.Tensor, memory: torch.Tensor) -> None:
        memory.copy_(inputs)

    def _write_inputs(self, mix: InputMix, memory: torch.Tensor) -> None:
        """Write the inputs that `mix` describes into `memory`, a tensor of bytes."""
        for index, view in enumerate(self.reference.layout.inputs.views(memory, 0)):
            self.reference.inputs.write(mix, index, view)

    def outputs(self, write_inputs: Callable[[torch.Tensor], object]) -> list[torch.Tensor]:
        """Return the float64 outputs for the inputs of one call.

        `write_inputs` is called with a tensor of bytes, into which it writes the inputs. The result is
        overwritten by the next call of this method. Raises InfrastructureError if the runner fails.
        """
        scheduler, seconds = self.reference.scheduler, self.reference.params.sandbox.run_seconds
        try:
            with scheduler.measuring():  # nothing else uses a GPU meanwhile
                runner = self.runner or self._start()
                write_inputs(self.buffers["inputs"].raw()[: self.reference.layout.inputs.stride])
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
            device = layout.device if name == "inputs" else layout.memory_of(name)
            self.buffers[name] = shared_memory.make_buffer(device, size)
        self.buffers["parameters"].raw().copy_(reference.parameters.raw())
        header: RoleHeader = {
            "role": "reference",
            "code": reference.code,
            "precision": reference.params.precision,
            "init_inputs": layout.description.init_inputs,
            "layout": layout.header(1, self.buffers),
            "construction_seed": reference.construction_seed,
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
                self.runner.close(wait=self.reference.layout.placement.shares_buffers)
                self.runner = None
            for buffer in self.buffers.values():
                buffer.close()
            self.buffers.clear()
