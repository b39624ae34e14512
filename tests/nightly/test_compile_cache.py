"""What torch.compile made of a task is compiled once, for that task only, and a damaged entry again."""

import contextlib
import copy
import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import judge_fixtures as corpus
import pytest

from components.core.errors import TaskError
from components.judge import baselines, compile_cache
from components.judge.baselines import COMPILE, EAGER, Baseline
from components.judge.compile_cache import CompileCache, entry_key
from components.judge.judge import Judge
from components.judge.task_bench import TaskBench
from components.judge.task_reference import TaskReference

# A task whose source fails in a runner of torch.compile that has received an archive.
REFUSES = f"""{corpus.CODE}
import os
if os.path.isdir("inductor") and os.listdir("inductor"):
    raise RuntimeError("an archive is here")
"""
# A task whose source reports what a runner of torch.compile can see.
REPORTS = f"""{corpus.CODE}
import os
if os.path.isdir("inductor"):
    raise RuntimeError((os.listdir("inductor"), [p for p in PLACES if os.path.exists(p)]))
"""


# Bytes of device memory.
SMALL_DEVICE = 8 << 30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder for the cache of compiled baselines."""
    monkeypatch.setattr(compile_cache, "user_cache", lambda name: tmp_path)
    return tmp_path


@contextlib.contextmanager
def bench(judge: Judge, code: str = corpus.CODE) -> Iterator[TaskBench]:
    with contextlib.closing(TaskBench(judge.params, judge.runner_factory, judge.scheduler, code)) as made:
        yield made


def is_cached(judge: Judge, code: str = corpus.CODE) -> bool:
    """Start and verify torch.compile in a new runner, and return whether it compiled nothing."""
    with bench(judge, code) as made:
        return made.baselines.get(COMPILE).is_cached


def test_a_task_is_compiled_once(cold_judge: Judge, folder: Path) -> None:
    assert [is_cached(cold_judge) for _ in range(2)] == [False, True]
    (entry,) = folder.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    simd = corpus.files("honest", "simd")
    assert cold_judge.verdict(corpus.TASK, simd, compare_compile=True).evidence["compile_cached"] is True
    assert list(folder.iterdir()) == [entry]


@pytest.fixture
def small_device(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the judge share out the memory of a small GPU, of which every task takes more than a tenth."""
    monkeypatch.setattr(judge.scheduler, "reservable_bytes", SMALL_DEVICE)
    monkeypatch.setattr(judge.scheduler, "free_bytes", SMALL_DEVICE)


@pytest.mark.usefixtures("small_device")
@pytest.mark.parametrize("code", [corpus.CODE, corpus.task("honest", "gemv").code], ids=["row", "product"])
def test_a_large_task_is_compiled_before_its_data_are_made(
    judge: Judge, folder: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    entries = []
    fill = TaskReference._fill

    def noted(reference: TaskReference, extra_bytes: int) -> None:
        entries.extend(path.name for path in folder.iterdir())
        assert reference.scheduler.free_bytes == SMALL_DEVICE
        fill(reference, extra_bytes)

    monkeypatch.setattr(TaskReference, "_fill", noted)
    with bench(judge, code) as made:
        assert entries == [entry_key(made.reference, COMPILE.mode)]
        assert made.baselines.get(COMPILE).is_cached


@pytest.mark.usefixtures("small_device")
def test_a_large_task_that_does_not_compile_is_judged(judge: Judge, folder: Path) -> None:
    code = f"{corpus.CODE}\nimport os\nif os.path.isdir('inductor'):\n    raise RuntimeError\n"
    with bench(judge, code) as made:
        assert list(folder.iterdir()) == []
        assert judge.scheduler.free_bytes < SMALL_DEVICE
        made.baselines.get(EAGER)


def test_the_modes_of_a_task_are_compared_once(
    judge: Judge, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = (COMPILE, Baseline("compile", "reduce-overhead"))
    monkeypatch.setitem(baselines.COMPILE_MODES, "cpu", modes)
    with bench(judge) as made:
        baselines.start_modes(made.baselines)
        _, best, seconds = baselines.fastest_mode(made.baselines)
        assert set(seconds) == set(modes)

    def unexpected(*_: object) -> dict[Baseline, float]:
        raise AssertionError("the modes are compared again")

    monkeypatch.setattr(baselines, "baseline_seconds", unexpected)
    with bench(judge) as made:
        baselines.start_modes(made.baselines)
        assert set(made.baselines.runners) == {best}
        runner, again, known = baselines.fastest_mode(made.baselines)
        assert (again, known, runner.is_cached) == (best, seconds, True)


def test_a_kept_choice_that_fails_is_replaced(
    judge: Judge, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Baseline("compile", "a-mode-that-torch-refuses")
    monkeypatch.setitem(baselines.COMPILE_MODES, "cpu", (COMPILE, refused))
    with bench(judge) as made:
        names = [COMPILE.mode, refused.mode]
        compile_cache.store_mode_seconds(made.reference, names, {COMPILE.mode: 2.0, refused.mode: 1.0})
        _, best, seconds = baselines.fastest_mode(made.baselines)
        assert (best, seconds) == (COMPILE, {COMPILE: 2.0})


def test_a_comparison_in_which_a_mode_failed_is_made_again(
    judge: Judge, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode may have failed by chance, and without it the baseline would be weaker for good."""
    modes = (COMPILE, Baseline("compile", "a-mode-that-torch-refuses"))
    monkeypatch.setitem(baselines.COMPILE_MODES, "cpu", modes)
    with bench(judge) as made:
        assert set(baselines.fastest_mode(made.baselines)[2]) == {COMPILE}
        assert compile_cache.load_mode_seconds(made.reference, [mode.mode for mode in modes]) == {}


def test_another_task_receives_nothing(judge: Judge, folder: Path) -> None:
    is_cached(judge)
    (entry,) = folder.iterdir()
    places = ["/cache", str(folder), str(entry)]
    with pytest.raises(TaskError) as caught:
        is_cached(judge, f"PLACES = {places!r}\n{REPORTS}")
    assert "RuntimeError: ([], [])" in str(caught.value)
    assert is_cached(judge, corpus.CODE + "\n# another digest\n") is False


def test_a_task_that_fails_with_its_archive_is_compiled_again(judge: Judge, folder: Path) -> None:
    assert is_cached(judge, REFUSES) is False
    (entry,) = folder.iterdir()
    before = entry.stat().st_ino
    assert is_cached(judge, REFUSES) is False
    assert entry.stat().st_ino != before


def test_modes_precisions_and_installations_have_their_own_entries(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench(judge) as made:
        reference = made.reference
    half = copy.copy(reference)
    half.params = judge.params.model_copy(update={"precision": "tf32"})
    keys = [entry_key(reference, "default"), entry_key(reference, "max-autotune"), entry_key(half, "default")]
    monkeypatch.setattr(compile_cache, "installation", lambda device: ("another version of torch",))
    assert len({*keys, entry_key(reference, "default")}) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"",
    ],
)
def test_a_damaged_entry_is_removed(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    cache.store("key", bytes(range(100)))
    (tmp_path / "key").write_bytes(damage((tmp_path / "key").read_bytes()))
    assert cache.load("key") == b"" and list(tmp_path.iterdir()) == []


def test_an_archive_that_cannot_be_unpacked_is_compiled_again(judge: Judge, folder: Path) -> None:
    with bench(judge) as made:
        key = entry_key(made.reference, "default")
    CompileCache(folder).store(key, b"what a hostile task may leave for itself")
    assert [is_cached(judge), is_cached(judge)] == [False, True]
    assert [path.name for path in folder.iterdir()] == [key]


def test_an_archive_that_is_too_large_is_not_kept(
    judge: Judge, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "MAX_ENTRY_BYTES", 100)
    assert is_cached(judge) is False
    assert list(folder.iterdir()) == []


def test_the_least_recently_used_entries_are_removed(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, max_bytes=3 * 132)
    for age, key in zip((300, 200, 100), "abc", strict=True):
        cache.store(key, bytes(100))
        os.utime(tmp_path / key, (time.time() - age, time.time() - age))
    assert cache.load("a") == bytes(100)
    cache.store("d", bytes(100))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c", "d"]
    assert cache.load("b") == b""


def test_judges_that_store_the_same_entry_leave_a_whole_one(tmp_path: Path) -> None:
    cache, archives = CompileCache(tmp_path), [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        stored = [threads.submit(cache.store, "key", archive) for archive in archives]
        seen = [cache.load("key") for _ in itertools.repeat(None, 200)]
        for each in stored:
            each.result()
    assert set(seen) <= {b"", *archives} and cache.load("key") in archives
