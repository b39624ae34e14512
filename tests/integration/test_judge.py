"""Verdicts on honest and on mistaken candidates, and the journal."""

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import judge_fixtures as corpus
import psutil
import pytest
import torch

from components.core.errors import InfrastructureError
from components.core.params import Params
from components.core.records import Precision
from components.core.task import KernelTask
from components.judge import (
    baselines,
    device_scheduler,
    input_mixing,
    measurement,
    task_layout,
    timed_runner,
)
from components.judge.baselines import COMPILE, EAGER, Baseline
from components.judge.correctness import ReferenceOutput
from components.judge.input_mixing import InputBank, InputMix
from components.judge.judge import Judge
from components.judge.pool.local_pool import Candidate, Job, LocalPool
from components.judge.timed_output_check import TimedOutputCheck
from components.judge.verdict import MARGIN, Verdict
from components.sandbox.inside import shared_memory

SIMD = corpus.files("honest", "simd")
KERNEL = "kernels/forward.cpp"
INLINE = "from torch.utils.cpp_extension import load_inline\n"
# Candidates that include torch's headers, which takes 8 to 40 s to build.
SLOW_BUILDS = ("inline_fast_math", "long_form_binding", "published_habits", "torch_library", "torch_types")
HONEST = [name for name in corpus.names("honest") if name not in SLOW_BUILDS][::3]


@pytest.mark.usefixtures("no_compile_baseline")
@pytest.mark.parametrize("name", HONEST)
def test_honest_candidate_is_correct(name: str, with_limits: Callable[[float, float], Judge]) -> None:
    """tests/nightly/test_honest_candidates.py judges nearly all, and compares with torch.compile too."""
    judge = with_limits(120, 600)  # seconds that a build with torch's headers needs on a busy machine
    verdict = judge.verdict(corpus.task("honest", name), corpus.files("honest", name))
    assert verdict.status == "correct", (verdict.reason, verdict.log)
    assert verdict.speedup.eager is not None
    assert verdict.milestone == (2 if verdict.speedup.eager.estimate > MARGIN else 1)


def test_compile_is_measured_only_for_candidates_that_beat_eager(judge: Judge) -> None:
    slow = SIMD | {
        KERNEL: (
            SIMD[KERNEL].replace(
                "KERNEL(forward) {", "KERNEL(forward) {\n  for (volatile int i = 0; i < 2000000; ++i) {\n  }"
            )
        )
    }
    verdict = judge.verdict(corpus.TASK, slow)
    assert (verdict.status, verdict.milestone, verdict.speedup.compile) == ("correct", 1, None)
    assert judge.verdict(corpus.TASK, slow, compare_compile=True).speedup.compile is not None


def test_an_evaluation_is_held_against_the_fastest_mode_of_compile_by_its_name(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = (
        COMPILE,
        *(Baseline("compile", mode) for mode in ("reduce-overhead", "a-mode-that-torch-refuses")),
    )
    monkeypatch.setitem(baselines.COMPILE_MODES, "cpu", modes)
    evidence = judge.verdict(corpus.TASK, SIMD, compare_compile=True).evidence
    assert set(evidence["compile_seconds"]) == {"default", "reduce-overhead"}
    assert evidence["compile_mode"] == min(evidence["compile_seconds"], key=evidence["compile_seconds"].get)


def test_an_evaluation_is_held_against_the_default_mode_alone_where_the_parameters_say_so(
    cold_judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(baselines.COMPILE_MODES, "cpu", (COMPILE, Baseline("compile", "reduce-overhead")))
    sandbox = cold_judge.params.sandbox.model_copy(update={"compile_modes": "default"})
    cold_judge.params = cold_judge.params.model_copy(update={"sandbox": sandbox})
    evidence = cold_judge.verdict(corpus.TASK, SIMD, compare_compile=True).evidence
    assert (evidence["compile_mode"], evidence["compile_seconds"]) == ("default", {})


def test_evidence_names_seeds_samples_and_digests(judge: Judge) -> None:
    evidence = judge.verdict(corpus.TASK, SIMD).evidence
    assert evidence["isolation"] == "bubblewrap"
    assert len(evidence["seeds"]) == 1 + judge.params.sandbox.correctness_sets
    raw = evidence["raw_seconds"]
    # A machine that is so busy that the time limit is near makes fewer than sandbox.rounds.
    assert measurement.LEAST_ROUNDS <= len(raw["candidate"]) <= judge.params.sandbox.most_rounds
    rounds = sum(1 + len(raw[name]) for name in ("candidate", "candidate_2") if name in raw)
    # Rounds that are made again, since results lay in new memory, have other inputs too.
    assert evidence["inputs"]["different_calls"] >= rounds * evidence["sets_per_round"]


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({KERNEL: SIMD[KERNEL].replace("0.1f", "0.11f")}, "wrong_output", "max_error"),
        (
            {KERNEL: SIMD[KERNEL].replace("return", "retrn").replace("vsigmoid(", "vsigmoit(")},
            "build_failed",
            "compiler",
        ),
        ({KERNEL: SIMD[KERNEL].replace("KERNEL(forward)", "KERNEL(backward)")}, "crashed", "exception"),
        ({"model_new.py": "class ModelNew(:\n"}, "load_failed", "syntax"),
        ({"model_new.py": corpus.MODEL_NEW.replace("ModelNew", "ModelOld")}, "load_failed", "import"),
        ({"model_new.py": corpus.MODEL_NEW.replace("1024", "1023")}, "load_failed", "import"),
        ({"model_new.py": "x = " + "-" * 50000 + "1\n"}, "load_failed", "syntax"),
        ({"model_new.py": "x = a" + ".a" * 20000 + "\n"}, "load_failed", "syntax"),
        ({"model_new.py": corpus.MODEL_NEW + "#" * 500_000}, "load_failed", "too_large"),
        ({"kernels/../../escape.h": ""}, "load_failed", "file_name"),
        ({"kernels/" + "x" * 300 + ".cpp": ""}, "load_failed", "file_name"),
        ({"cuda_extension/__init__.py": "import torch"}, "load_failed", "file_name"),
        ({KERNEL: SIMD[KERNEL] + "// \ud800"}, "load_failed", "not_unicode"),
        # Python would execute the comment's second line; the screening reads it as a comment.
        ({"model_new.py": "# coding: utf-7\n# +AAo-import os\n" + corpus.MODEL_NEW}, "load_failed", "import"),
        ({"model_new.py": INLINE + "x = 0x" + "f" * 6000 + "\n"}, "load_failed", "syntax"),
        ({"model_new.py": INLINE + "x = 1" + " + 1" * 2000 + "\n"}, "load_failed", "syntax"),
        ({"model_new.py": INLINE + "x" + ".x" * 900 + "()\n"}, "load_failed", "syntax"),
        (
            {
                "model_new.py": INLINE
                + 'm = load_inline(name="m", cpp_sources="\\ud800")\n'
                + corpus.MODEL_NEW
            },
            "load_failed",
            "extension_sources",
        ),
    ],
)
def test_mistake_is_named(change: dict[str, str], status: str, reason: str, judge: Judge) -> None:
    verdict = judge.verdict(corpus.TASK, SIMD | change)
    assert (verdict.status, verdict.milestone) == (status, -1), verdict.log
    assert verdict.reason.startswith(reason)


def test_missing_files_are_named(judge: Judge) -> None:
    assert judge.verdict(corpus.TASK, {KERNEL: SIMD[KERNEL]}).reason == "no_model_new"
    assert judge.verdict(corpus.TASK, {"model_new.py": corpus.MODEL_NEW}).status == "build_failed"


def test_where_an_input_is_marked_is_neither_foretold_by_torchs_seed_nor_felt_by_it() -> None:
    def places() -> list[int]:
        memory = torch.zeros(64 * shared_memory.PAGE_BYTES, dtype=torch.uint8)
        torch.manual_seed(0)
        before = torch.get_rng_state()
        with shared_memory.corrupted_pages(memory):
            found = memory.nonzero().flatten().tolist()
        assert torch.equal(torch.get_rng_state(), before) and not memory.any() and len(found) == 64
        return found

    assert places() != places()


def test_dead_baseline_is_not_the_candidates_fault(judge: Judge, tmp_path: Path) -> None:
    pool = LocalPool(judge.params, tmp_path / "verdicts")
    pool._judge = judge
    judge.verdict(corpus.TASK, SIMD)
    runner = judge.bench_cache.benches[judge.bench_key(corpus.TASK)].baselines.runners[EAGER].runner
    assert runner is not None
    runner.signal(9)  # as the kernel does when memory runs out
    assert pool.submit(Job(corpus.TASK, Candidate.of(SIMD), "0")).result(600).status == "correct"
    pool.threads.close()


def test_timed_rounds_on_a_gpu_have_a_core_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: dict[int, frozenset[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", moved.__setitem__)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(device_scheduler, "_hardware_threads", lambda core: frozenset({core}))
    timed, others = device_scheduler.cores.__wrapped__("cuda")
    assert timed == {6} and others == set(range(8)) - timed
    assert moved[os.getpid()] == others
    monkeypatch.setattr(
        device_scheduler, "_hardware_threads", lambda core: frozenset({core, core ^ 1})
    )  # 0 and 1 are one core, 2 and 3 the next
    assert device_scheduler.cores.__wrapped__("cuda") == (
        {5},
        set(range(8)) - {4, 5},
    ), "nothing else works on the timed core's other thread"
    moved.clear()
    assert device_scheduler.cores.__wrapped__("cpu") == (set(range(8)),) * 2 and not moved


def test_pool_measures_once_per_epoch(ci_params: Params, judge: Judge, tmp_path: Path) -> None:
    pool = LocalPool(ci_params, tmp_path / "verdicts")
    pool._judge = judge  # a warm one: the pool would start its own
    job = Job(corpus.TASK, Candidate.of(SIMD), "3")
    first = pool.submit(job).result(600)
    assert pool.submit(job).result(600) == first
    again = LocalPool(ci_params, tmp_path / "verdicts")
    assert again.submit(job).result(30) == first  # from the journal: this pool has no judge, and starts none
    assert again._judge is None
    other = pool.submit(Job(corpus.TASK, Candidate.of(SIMD), "4")).result(600)
    assert other.evidence["raw_seconds"] != first.evidence["raw_seconds"]
    evaluated = pool.submit(
        Job(corpus.TASK, Candidate.of(corpus.files("honest", "naive")), "evaluation-1", compare_compile=True)
    ).result(600)
    assert evaluated.status == "correct" and evaluated.speedup.compile is not None
    for each in (pool, again):
        each.threads.close()


def test_candidate_with_a_lone_surrogate_has_a_digest() -> None:
    assert Candidate.of({KERNEL: "\ud800"}).files == ((KERNEL, "?"),)


def test_task_that_hangs_later_hangs_nobody(
    with_limits: Callable[[float, float], Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first calls are quick: only the baseline that is measured meets the endless one."""
    monkeypatch.setattr(timed_runner, "BASELINE_LIMITS", 2)
    count = """    calls = 0

    def count(self, y):
        Model.calls += 1
        end = time.process_time() + 0.05
        while Model.calls < 4 and time.process_time() < end:
            pass  # so that the task is described after three calls
        while Model.calls > 15:
            pass
        return y

    def forward"""
    code = (
        corpus.changed_code("self.count(torch.sigmoid(x) * self.scale - 0.3)")
        .replace("    def forward", count)
        .replace("import torch\n", "import time\nimport torch\n", 1)
    )
    started = time.monotonic()
    verdict = with_limits(3, 30).verdict(
        KernelTask(code=code), SIMD | {KERNEL: SIMD[KERNEL].replace("v > 0.0f ? v : 0.1f * v", "v")}
    )
    assert (verdict.status, verdict.reason) == ("infrastructure", "task")
    assert "eager took longer" in verdict.log
    assert time.monotonic() - started < 60


def test_processes_that_a_task_started_stand_still_between_its_rounds(judge: Judge) -> None:
    busy = corpus.CODE + "\nimport os\nif os.fork() == 0:\n    while True:\n        pass\n"
    with judge.bench(KernelTask(code=busy)) as bench:
        runner = bench.baselines.get(EAGER).runner
        assert runner is not None
        (child,) = psutil.Process(runner.pid).children(recursive=True)
        assert child.status() == psutil.STATUS_STOPPED
        before = child.cpu_times()
        time.sleep(0.1)
        assert child.cpu_times() == before


SLEEPY = """    calls = 0

    def rest(self, y):
        Model.calls += any(frame.name == "measure" for frame in traceback.extract_stack())
        if Model.calls > 7:  # those of warm-up and verification
            time.sleep(1)
        return y

    def forward"""


@pytest.mark.usefixtures("no_compile_baseline")
def test_a_task_that_sleeps_in_timed_rounds_holds_the_device_no_longer_than_a_candidate_may(
    with_limits: Callable[[float, float], Judge],
) -> None:
    """Asleep, a baseline uses no CPU time, and each of its rounds ends within its own limit."""
    code = corpus.changed_code("self.rest(torch.sigmoid(x) * self.scale - 0.3)")
    code = code.replace("    def forward", SLEEPY)
    code = code.replace("import torch\n", "import time\nimport traceback\nimport torch\n", 1)
    files = SIMD | {KERNEL: SIMD[KERNEL].replace("v > 0.0f ? v : 0.1f * v", "v")}
    judge = with_limits(4, 30)
    with judge.bench(KernelTask(code=code)) as bench:
        bench.baselines.get(EAGER)
    started = time.monotonic()
    verdict = judge.verdict(KernelTask(code=code), files)
    assert verdict.status in ("correct", "infrastructure"), verdict
    assert time.monotonic() - started < 30


def test_a_large_input_is_mixed_in_pieces_as_a_small_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the mixture with rolled whole tensors: all runners get the same, so an error is silent."""
    bank = [[torch.randn(7, 11), torch.rand(13, dtype=torch.float64)] for _ in range(3)]
    for limit in (1 << 20, 0):
        monkeypatch.setattr(input_mixing, "MAX_DOUBLED_BYTES", limit)
        sets = InputBank(bank, ["given"], "cpu")
        assert not sets.draws
        for turn in ((0, 0), (5, 5), (76, 3), (3, 76), (1, 0)):
            mix = InputMix(1, 2, (turn[0], turn[0] % 13), (turn[1], turn[1] % 13), 0.3)
            for index, shifts in enumerate(zip(mix.first_shifts, mix.second_shifts, strict=True)):
                mixed = torch.empty_like(bank[0][index]).flatten()
                sets.write(mix, index, mixed)
                first, second = (
                    bank[number][index].flatten().roll(-shift) for number, shift in enumerate(shifts, 1)
                )
                assert torch.equal(mixed, torch.lerp(first, second, 0.3))


def test_a_judge_may_hold_as_many_descriptors_as_the_system_allows(ci_params: Params, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[1]), limits[1]))
    try:
        Judge(ci_params, tmp_path).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_large_task_has_fewer_families_and_is_judged(
    cold_judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_layout, "MAX_REFERENCE_BYTES", 1)
    monkeypatch.setattr(input_mixing, "MAX_DOUBLED_BYTES", 1)
    answers = {
        name: cold_judge.verdict(corpus.task(group, name), corpus.files(group, name)).status
        for group, name in (("honest", "simd"), ("exploits", "pointer_cache"))
    }
    assert answers == {"simd": "correct", "pointer_cache": "wrong_output"}
    narrow = cold_judge.verdict(
        corpus.task("exploits", "narrow_range"), corpus.files("exploits", "narrow_range")
    )
    assert (narrow.status, narrow.reason) == ("wrong_output", "max_error:wide")
    layouts = [bench.reference.layout for bench in cold_judge.bench_cache.benches.values()]
    assert {tuple(layout.distributions) for layout in layouts} == {("given",)}


def test_the_runner_of_float64_outputs_is_stopped_between_uses_and_replaced_if_it_dies(
    cold_judge: Judge,
) -> None:
    def judged() -> Verdict:
        return cold_judge.verdict(
            corpus.task("honest", "double_cumprod"), corpus.files("honest", "double_cumprod")
        )

    assert judged().status == "correct"
    (bench,) = cold_judge.bench_cache.benches.values()
    runner = bench.timed_output_check.source.runner
    assert runner is not None and psutil.Process(runner.pid).status() == psutil.STATUS_STOPPED
    runner.signal(9)
    with pytest.raises(InfrastructureError, match="runner of the task's source"):
        judged()
    assert bench.timed_output_check.source.runner is None and not bench.timed_output_check.source.buffers
    assert judged().status == "correct" and bench.timed_output_check.source.runner is not None


def test_comparisons_with_float64_take_no_time_of_the_candidates_limit(
    with_limits: Callable[[float, float], Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, pauses = TimedOutputCheck.wrong_call, iter([0.8] * 6)

    def slow(self: TimedOutputCheck, *arguments: Any) -> str | None:
        time.sleep(next(pauses, 0))
        return honest(self, *arguments)

    monkeypatch.setattr(TimedOutputCheck, "wrong_call", slow)
    judge = with_limits(3, 60)
    began = time.monotonic()
    assert judge.verdict(corpus.TASK, SIMD).status == "correct"
    assert time.monotonic() - began > 3


def test_what_tf32_rounds_is_allowed_where_tf32_is_the_precision(ci_params: Params) -> None:
    """A product of operands of 11 bits is right at tf32 and wrong at float32, against its float64 value."""
    exact = torch.randn(256, 512, dtype=torch.float64) @ torch.randn(512, 256, dtype=torch.float64)
    rounded = (exact * (1 + 5e-4 * torch.randn_like(exact))).float()
    cases: tuple[tuple[Precision, bool], ...] = (("tf32", True), ("strict-fp32", False))
    for precision, right in cases:
        single = rounded if precision == "tf32" else exact.float()
        expected = ReferenceOutput(single, exact, ci_params.sandbox, precision)
        assert (expected.mismatch(exact.float()) is None) and (expected.mismatch(rounded) is None) == right
        assert expected.mismatch(torch.zeros_like(rounded)) == "max_error"


def test_symbols_behind_a_megabyte_of_others_are_not_overlooked(judge: Judge) -> None:
    names = [f"PyA{'a' * 1000}{number:05d}" for number in range(1100)]
    declared = "".join(f'extern "C" void {name}() __attribute__((weak));\n' for name in names)
    hidden = (
        f'extern "C" int system(const char*);\nstatic void (*volatile kept[])() = {{{",".join(names)}}};\n'
    )
    code = SIMD[KERNEL].replace(
        "KERNEL(forward) {",
        f"{declared}{hidden}KERNEL(forward) {{\n  if (kept[3] != nullptr) system(nullptr);",
    )
    verdict = judge.verdict(corpus.TASK, SIMD | {KERNEL: code})
    assert (verdict.status, verdict.reason) == ("forbidden", "symbol:too_many_symbols")


@pytest.mark.timeout(60)
def test_a_source_of_line_ends_holds_nobody_up(judge: Judge) -> None:
    """The look for an include of torch is quick at 100,000 lines: other threads wait for it."""
    assert judge.verdict(corpus.TASK, SIMD | {KERNEL: SIMD[KERNEL] + "\n" * 1_000_000}).status == "correct"
