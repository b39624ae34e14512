"""The counters of a GPU's hardware: the observed process, and how ncu's report is read and told.

ncu needs a GPU, so tests/fixtures/ncu takes its place: it runs the process that ncu would observe, here on
cpu, and writes what ncu wrote about another one.
"""

import shutil
from pathlib import Path

import judge_fixtures as corpus
import pytest
from typer.testing import CliRunner

from components.cli.main import app
from components.core.config import PROJECT, resolve
from components.core.errors import UserError
from components.core.params import Params
from components.judge.counters import check_counters, count, read_report
from components.judge.judge import Judge
from components.judge.verdict import Verdict, WorkloadFigures, counter_lines

SIMD = corpus.files("honest", "simd")


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the judge find the program that takes the place of ncu, where every account may execute it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for path in (tmp_path.parent, tmp_path, folder):
        path.chmod(0o755)
    shutil.copy(Path(__file__).parents[1] / "fixtures" / "ncu", folder)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.usefixtures("ncu")
def test_a_call_is_made_in_a_sandbox_of_its_own_and_the_report_is_read(judge: Judge) -> None:
    built = judge._build(corpus.TASK, SIMD)
    with judge.bench(corpus.TASK) as bench:
        found = count(judge.params, bench.reference, built)
    assert found["launches"] == 2 and found["kernels"][0] == {
        "kernel": "void vectorized_elementwise_kernel<4, AUnaryFunctor<float>>(int, T2, T3)",
        "nanoseconds": 9664,
        "dram_percent": 61.43,
        "sm_percent": 5.79,
        "occupancy_percent": 68.16,
        "registers": 32,
        "local_accesses": 0,
        "bank_conflicts": 0,
    }
    first, second = counter_lines(Verdict(status="correct", evidence={"counters": found}))
    assert first.endswith(
        "T3): 9.7 us, DRAM 61 %, SM 6 %, occupancy 68 %, 32 registers, 0 accesses of local memory, "
        "0 bank conflicts."
    )
    assert "1536 accesses of local memory" in second, "loads and stores"


@pytest.mark.usefixtures("ncu")
def test_a_call_that_fails_leaves_the_verdict_without_counters(judge: Judge) -> None:
    raising = {"model_new.py": SIMD["model_new.py"] + "\n    def forward(self, x):\n        raise KeyError\n"}
    built = judge._build(corpus.TASK, SIMD | raising)
    with judge.bench(corpus.TASK) as bench:
        found = count(judge.params, bench.reference, built)
    assert found == {"error": "==ERROR== The application returned an error code (1)."}
    assert counter_lines(Verdict(status="correct", evidence={"counters": found})) == [
        "the GPU's counters were not read: ==ERROR== The application returned an error code (1)."
    ]


def test_a_report_without_numbers_or_kernels() -> None:
    assert read_report("==WARNING== No kernels were profiled.\n") == {
        "error": "Nsight Compute saw no kernel."
    }
    assert "ERR_NVGPUCTRPERM" in read_report("==ERROR== ERR_NVGPUCTRPERM - The user may not\n")["error"]
    kernel = read_report('"Kernel Name","gpu__time_duration.sum"\n"","ns"\n"f","n/a"\n')["kernels"][0]
    assert kernel["nanoseconds"] is None and kernel["registers"] is None
    lines = counter_lines(
        Verdict(status="correct", evidence={"counters": {"kernels": [kernel], "launches": 3}})
    )
    assert lines[0].startswith("f: ? us, DRAM ? %") and lines[1] == "2 more kernels."
    figures = tuple(WorkloadFigures(call=call) for call in ("get_inputs(2)", "get_inputs(8)"))
    single = [{"counters": {"kernels": [kernel], "launches": 1}}, {"counters": {"error": "no report."}}]
    lines = counter_lines(Verdict(status="correct", evidence={"workloads": single}, workloads=figures))
    assert lines[0].startswith("get_inputs(2): f: ? us")
    assert lines[1] == "get_inputs(8): the GPU's counters were not read: no report."


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (("device=cpu",), "the device is cpu"),
        (("device=cuda", "sandbox.isolation=none"), "sandbox.isolation is none"),
        (("device=cuda",), "neither in PATH nor in CUDA_HOME"),
    ],
)
def test_counters_that_cannot_be_read_are_refused(
    sets: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "/bin")
    params: Params = resolve("", ("sandbox.counters=true", *sets)).params
    with pytest.raises(UserError, match=says):
        check_counters(params)


@pytest.mark.parametrize("option", ["--counters", "--cold-cache"])
def test_options_for_a_gpu_are_refused_on_cpu(option: str) -> None:
    done = CliRunner().invoke(app, ["judge", str(PROJECT / "agent_workdir"), "--device", "cpu", option])
    assert isinstance(done.exception, UserError)
    assert str(done.exception).startswith(f"{option}: the device is cpu")
