"""Inputs of a round of calls, which the judge makes before it copies them to the runners.

A round is a series of calls that are timed together, and a runner is a sandboxed process of a candidate or a
baseline.
"""

from __future__ import annotations

import torch

from components.core.errors import TaskError
from components.judge.input_mixing import InputMix, fingerprint
from components.judge.task_reference import TaskReference

# Largest number of attempts to draw inputs that no earlier call had.
MAX_DRAWS = 8
# Number of words of 8 bytes of a call's mixed inputs from which its fingerprint is computed. Those of two
# mixtures differ in almost every word.
SAMPLED_WORDS = 1 << 12


class StagedInputs:
    """Inputs of a round of calls, made in memory that no sandboxed process can read and then copied to each.

    A round is a series of calls that are timed together, and `reference` has the task's data. The memory
    holds the inputs of `capacity` calls. Those of a call are a combination of input sets or drawn anew, as
    its `InputMix` says. They are made in advance, because on cuda the clock runs while a process gets its
    inputs, and combining the sets takes as many kernel launches as a small task.
    """

    def __init__(self, reference: TaskReference, capacity: int):
        self.reference = reference
        self.stride = reference.layout.inputs.stride
        self.memory = torch.zeros(self.stride * capacity, dtype=torch.uint8, device=reference.params.device)
        self.mixes: list[InputMix] = []
        # Fingerprints of the inputs of all timed calls.
        self.fingerprints: set[int] = set()
        self.views = [reference.layout.inputs.views(self.memory, number) for number in range(capacity)]

    def hold(self, mixes: list[InputMix]) -> StagedInputs:
        """Write the inputs that `mixes` describe into the memory, and return this object.

        `mixes` has an entry for each call, and at most `capacity` entries. No process of a candidate (an
        implementation that is judged) may compute meanwhile. Raises TaskError if the task's `get_inputs`
        fails.
        """
        self.mixes = mixes
        for mix, views in zip(mixes, self.views, strict=False):
            self.reference.write_inputs(mix, views)
        return self

    def hold_fresh(self, calls: int, number: int) -> StagedInputs:
        """Write inputs that no earlier call had for the calls of round `number`, and return this object.

        A round is a series of timed calls, here of `calls` calls. Its number, which begins at 0, determines
        the input distribution of one of them (`InputBank.fresh`). If this call's inputs are those of an
        earlier call, they are drawn again, at first from the same distribution and then from `given`. Raises
        TaskError if the task's `get_inputs` fails, or if it draws inputs of earlier calls `MAX_DRAWS` times
        in a row.
        """
        self.hold(self.reference.inputs.fresh(calls, number))
        for index, views in enumerate(self.views[:calls]):
            for attempt in range(MAX_DRAWS):
                memory = self.memory[index * self.stride :][: self.stride]
                drawn = self.mixes[index].seed is not None
                found = fingerprint(memory, None if drawn else SAMPLED_WORDS)
                if found not in self.fingerprints:
                    break
                # A distribution that rounds may have no other value of a small input, and is then given up.
                kept = self.mixes[index].distribution if attempt < MAX_DRAWS // 2 else "given"
                self.mixes[index] = self.reference.inputs.fresh(1)[0]._replace(distribution=kept)
                self.reference.write_inputs(self.mixes[index], views)
            else:
                raise TaskError(
                    f"get_inputs() returned equal inputs {MAX_DRAWS} times in a row under different seeds; "
                    "let it draw random values, and fix no seed, so that a kept answer can be told from a "
                    "kernel"
                )
            self.fingerprints.add(found)
        return self

    @property
    def inputs(self) -> torch.Tensor:
        """Inputs of the calls that are timed together, as a uint8 tensor with one call after another."""
        return self.memory[: self.stride * len(self.mixes)]
