"""With one defence of the judge switched off an exploit succeeds, so each is needed and tested."""

import contextlib
import itertools
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import judge_fixtures as corpus
import pytest

from components.judge import (
    candidate,
    error_measures,
    input_mixing,
    limit,
    measurement,
    result_memory,
    staged_inputs,
    task_layout,
    timed_output_check,
)
from components.judge.input_mixing import InputBank, InputMix
from components.judge.judge import Judge
from components.judge.timed_output_check import TimedOutputCheck
from components.judge.timed_runner import Operation, TimedRunner
from components.judge.verdict import Verdict
from components.sandbox import runner_factory, seccomp_filter
from components.sandbox.build import EXTENSION_SUFFIX
from components.sandbox.inside import shared_memory
from components.sandbox.runner_factory import RunnerFactory
from components.sandbox.runner_process import Runner, RunnerError

pytestmark = pytest.mark.usefixtures("no_compile_baseline")
SANDBOX = runner_factory.INSIDE_FOLDER


@pytest.fixture(autouse=True)
def no_least_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the refusal of impossible times, which candidates that compute nothing have."""
    monkeypatch.setattr(limit, "POSSIBLE", 0.0)


def verdict(judge: Judge, name: str) -> Verdict:
    return judge.verdict(corpus.task("exploits", name), corpus.files("exploits", name))


def test_same_inputs_in_every_round(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round's inputs were never seen before."""

    def known(self: InputBank, calls: int, number: int) -> list[InputMix]:
        return list(itertools.islice(itertools.cycle(self.correctness_sets()), calls))

    monkeypatch.setattr(InputBank, "fresh", known)
    monkeypatch.setattr(staged_inputs, "fingerprint", lambda *_: secrets.randbits(64))
    assert verdict(cold_judge, "pointer_cache").status == "correct"


def test_timed_outputs_unchecked(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very outputs that were timed are checked, and once more after them."""
    verify, looks = TimedRunner.verify, iter([True])

    def first_only(self: TimedRunner, operation: Operation, *, loose: float = 0.0) -> str | None:
        if self.role == "candidate" and not next(looks, False):
            return None
        return verify(self, operation, loose=loose)

    monkeypatch.setattr(
        TimedOutputCheck, "wrong_call", lambda self, mixes, inputs, results, eager_results: None
    )
    assert verdict(cold_judge, "stale_after_calls").status == "wrong_output"
    monkeypatch.setattr(TimedRunner, "verify", first_only)
    # A later call writes nothing, and its output may lie in memory that was never written.
    monkeypatch.setattr(Runner, "is_written", lambda self, address, size, total: True)
    assert verdict(cold_judge, "stale_after_calls").status == "correct"


def test_inputs_not_compared(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimedRunner, "_inputs_differ", lambda self, inputs, staged: False)
    assert verdict(cold_judge, "changed_input").status == "correct"


def test_inputs_not_marked(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result is memory of its own: no input's, and no page of it twice."""
    monkeypatch.setattr(Runner, "is_private_memory", lambda self, address, size: True)
    assert verdict(cold_judge, "mapped_twice").reason == "output_not_written"
    monkeypatch.setattr(Runner, "is_written", lambda self, address, size, total: True)
    assert verdict(cold_judge, "mapped_twice").status == "correct"
    assert verdict(cold_judge, "mapped_input").status == "wrong_output"
    monkeypatch.setattr(shared_memory, "corrupted_pages", lambda memory: contextlib.nullcontext())
    assert verdict(cold_judge, "mapped_input").reason == "inputs_changed"
    monkeypatch.setattr(Runner, "write_memory", lambda self, addresses, sources, sizes: None)
    assert verdict(cold_judge, "mapped_input").status == "correct"


def test_results_not_overwritten(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(cold_judge, "written_once").status == "wrong_output"
    monkeypatch.setattr(Runner, "write_memory", lambda self, addresses, sources, sizes: None)
    assert verdict(cold_judge, "written_once").status == "correct"


@pytest.mark.parametrize(
    ("name", "place", "known"),
    [("minus_one", "LOUD_BYTES", 0xFF), ("constant_bools", "BOOLEANS", 1)],
)
def test_results_overwritten_with_what_is_known(
    name: str, place: str, known: int, cold_judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_memory, place, (known,))
    assert verdict(cold_judge, name).status == "correct"


def test_truth_values_overwritten_with_one(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_memory, "BOOLEANS_PERIOD", 1)
    assert verdict(cold_judge, "seen_bools").status == "correct"


def test_places_of_results_not_counted(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_memory, "FEW_ADDRESSES", 1 << 20)
    monkeypatch.setattr(measurement, "MOST_REPEATED", 0)
    monkeypatch.setattr(Runner, "is_written", lambda self, address, size, total: True)
    assert verdict(cold_judge, "small_outputs").status == "correct"


def test_pages_not_looked_at(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "is_written", lambda self, address, size, total: True)
    assert verdict(cold_judge, "dropped_pages").status == "correct"


def test_pages_may_be_moved(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = [name for name in seccomp_filter.DENIED_TO_CPU_CANDIDATES if name != "mremap"]
    monkeypatch.setattr(seccomp_filter, "DENIED_TO_CPU_CANDIDATES", denied)
    monkeypatch.setattr(seccomp_filter, "seccomp_program", seccomp_filter.seccomp_program.__wrapped__)
    assert verdict(cold_judge, "moved_pages").status == "correct"


def test_one_family_of_inputs(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_layout, "INPUT_DISTRIBUTIONS", ("given",))
    monkeypatch.setattr(input_mixing, "INPUT_DISTRIBUTIONS", {"given": lambda x: x})
    assert verdict(cold_judge, "given_family_only").status == "correct"


def test_no_inputs_of_wide_range(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: change for name, change in task_layout.INPUT_DISTRIBUTIONS.items() if name != "wide"}
    for module in (task_layout, input_mixing):
        monkeypatch.setattr(module, "INPUT_DISTRIBUTIONS", others)
    assert verdict(cold_judge, "narrow_range").status == "correct"


def test_one_family_of_timed_inputs(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = InputBank.fresh
    monkeypatch.setattr(InputBank, "fresh", lambda self, calls, number: fresh(self, calls))
    assert verdict(cold_judge, "unsafe_when_timed").status == "correct"


def test_tolerance_of_the_public_harnesses(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_measures, "FLOAT32_FLOOR", 1e-2)
    monkeypatch.setattr(error_measures, "block_limits", lambda dtype, block: ())
    sandbox = cold_judge.params.sandbox.model_copy(update={"absolute_tolerance": 1e-2})
    cold_judge.params = cold_judge.params.model_copy(update={"sandbox": sandbox})
    assert verdict(cold_judge, "half_precision").status == "correct"


def test_comparison_that_nan_passes(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = error_measures.row_magnitudes
    for module in (error_measures, timed_output_check):
        monkeypatch.setattr(module, "row_magnitudes", lambda error: honest(error.nan_to_num(0.0)))
    assert verdict(cold_judge, "nan_answer").status == "correct"


def test_clock_of_one_thread(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts every thread of the runner."""

    def main_thread(self: Runner) -> float:
        return 1e-9 * int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0])

    monkeypatch.setattr(Runner, "cpu_seconds", main_thread)
    said = verdict(cold_judge, "thread_does_it")
    assert said.status == "correct" and said.speedup.eager is not None, said
    assert said.speedup.eager.estimate > 1  # with the whole clock about 0.1


def test_no_system_call_filter(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(cold_judge, "common_lock").status == "correct"  # it answers only if it gets no lock
    program = seccomp_filter.seccomp_program
    monkeypatch.setattr(
        seccomp_filter,
        "seccomp_program",
        lambda role, device="cpu": b"" if role == "candidate" else program(role, device),
    )
    assert verdict(cold_judge, "common_lock").status == "wrong_output"


def seconds_between_rounds(judge: Judge) -> float:
    """CPU seconds that a candidate takes while nobody measures it."""
    files = corpus.files("exploits", "loud_neighbour")
    library = judge.builder.build(files).library
    assert library is not None
    with judge.bench(corpus.TASK) as bench, open(runner_factory.sealed_file(library), "rb") as file:
        arm = TimedRunner(
            bench.reference,
            {
                "role": "candidate",
                "files": {"model_new.py": files["model_new.py"]},
                "suffix": EXTENSION_SUFFIX,
                "rules": "kernel-only",
                "extensions": None,
                "library_bytes": len(library),
                "triton_bytes": 0,
            },
            file.fileno(),
            seconds=30,
        )
        try:
            arm.verify("check")
            assert arm.runner is not None
            time.sleep(0.2)
            return arm.runner.cpu_seconds() - arm.runner.stopped_cpu_seconds
        finally:
            arm.close()


def test_no_stop_between_rounds(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its rounds a candidate stands still, whatever its threads would do to the baselines."""
    assert seconds_between_rounds(cold_judge) < 0.002
    monkeypatch.setattr(Runner, "stop", lambda self: None)
    with pytest.raises(RunnerError, match="while it was stopped"):
        seconds_between_rounds(cold_judge)


def test_no_screen_of_symbols(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(cold_judge, "fork_symbol").status == "forbidden"
    monkeypatch.setattr(candidate, "screen_symbols", lambda symbols, binding: None)
    assert verdict(cold_judge, "fork_symbol").status == "correct"


def test_no_screen_of_the_syntax_tree(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict(cold_judge, "patched_time").status == "forbidden"
    monkeypatch.setattr(candidate, "screen_python", lambda code: None)
    assert verdict(cold_judge, "patched_time").status == "correct"


def test_runner_that_speaks_before_it_is_asked(cold_judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner waits for the judge's message after every result; one that answers ahead is ended."""
    # Where it is held up between two messages its first answer is found to be wrong before the second is
    # there.
    assert any(verdict(cold_judge, "native_ahead").reason == "protocol" for _ in range(3))
    monkeypatch.setattr(Runner, "is_waiting", lambda self: True)
    assert verdict(cold_judge, "native_ahead").status == "wrong_output"


@pytest.fixture
def mutated(
    cold_judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str, str], Judge]]:
    """A judge whose runners have `old` replaced by `new` in one file that runs inside the sandbox."""
    nurseries: list[RunnerFactory] = []

    def make(file: str, old: str, new: str) -> Judge:
        for inside in SANDBOX.glob("*.py"):
            shutil.copy(inside, tmp_path)
        text = (tmp_path / file).read_text()
        assert text.count(old) == 1, f"{file} has changed: {old}"
        (tmp_path / file).write_text(text.replace(old, new))
        monkeypatch.setattr(runner_factory, "INSIDE_FOLDER", tmp_path)
        nurseries.append(
            RunnerFactory(
                cold_judge.params.sandbox,
                cold_judge.params.device,
                tmp_path / "home",
                cold_judge.runner_factory.result_channel,
            )
        )
        cold_judge.runner_factory = nurseries[-1]
        return cold_judge

    yield make
    cold_judge.bench_cache.close()
    for each in nurseries:
        each.close()


@pytest.mark.parametrize(
    ("file", "old", "new", "name"),
    [
        # torch's kernels replaced
        ("runner.py", "block_operators(shared.device)", "None", "torch_when_unwatched"),
        ("runner.py", "if type_of(leaf) is not plain:", "if False:", "tensor_subclass"),
        (
            "reference.py",
            "if seed is None or value.dtype == torch.bool:",
            "if only is None:",
            "ignored_parameter",
        ),  # randomised parameters
    ],
)
def test_without_a_defence_inside_the_runner(
    file: str,
    old: str,
    new: str,
    name: str,
    mutated: Callable[[str, str, str], Judge],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidate, "screen_python", lambda code: None)
    assert verdict(mutated(file, old, new), name).status == "correct"
