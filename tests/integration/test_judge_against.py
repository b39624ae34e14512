"""One candidate compared with another in the same rounds."""

from pathlib import Path

import httpx
import judge_fixtures as corpus
import pytest
from service_fixtures import service_of

from components.core.params import Params
from components.judge.baselines import COMPILE
from components.judge.judge import Judge
from components.judge.verdict import MARGIN

SIMD = corpus.files("honest", "simd")
KERNEL = "kernels/forward.cpp"


def slower(iterations: int) -> dict[str, str]:
    """Return the candidate with a loop of that many iterations, which costs nothing else."""
    loop = f"KERNEL(forward) {{\n  for (volatile int i = 0; i < {iterations}; ++i) {{\n  }}"
    return SIMD | {KERNEL: SIMD[KERNEL].replace("KERNEL(forward) {", loop)}


def test_the_other_candidate_takes_the_place_of_compile(judge: Judge) -> None:
    found = judge.verdict(corpus.TASK, SIMD, against=slower(2_000_000))
    assert found.status == "correct" and found.speedup.compile is None
    ratio, seconds = found.speedup.against, found.seconds
    assert ratio is not None and ratio.low > MARGIN and seconds.candidate is not None
    assert seconds.against is not None and seconds.against > seconds.candidate
    back = judge.verdict(corpus.TASK, slower(2_000_000), against=SIMD).speedup.against
    assert back is not None and back.high < 1


def test_a_comparison_leaves_the_baselines_of_other_threads_alone(judge: Judge) -> None:
    assert judge.verdict(corpus.TASK, SIMD, compare_compile=True).status == "correct"
    (bench,) = (one for one in judge.bench_cache.benches.values() if one.reference.code == corpus.TASK.code)
    compiled = bench.baselines.runners[COMPILE]
    assert judge.verdict(corpus.TASK, SIMD, against=slower(1000)).status == "correct"
    assert bench.baselines.runners[COMPILE] is compiled


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("vsigmoid(", "vsigmoit("), "build_failed"),
        (("0.1f", "0.11f"), "wrong_output (max_error"),
        (("KERNEL(forward)", "KERNEL(backward)"), "crashed"),
    ],
)
def test_a_fault_of_the_other_is_not_the_candidates(change: tuple[str, str], says: str, judge: Judge) -> None:
    other = SIMD | {KERNEL: SIMD[KERNEL].replace(*change)}
    found = judge.verdict(corpus.TASK, SIMD, against=other)
    assert (found.status, found.reason) == ("infrastructure", "against")
    assert found.log.startswith("the candidate to compare with: ") and says in found.log


def test_a_service_compares_too_and_keeps_its_answers_apart(ci_params: Params, tmp_path: Path) -> None:
    with service_of([corpus.TASK], ci_params, tmp_path) as address:

        def judged(**fields: object) -> dict[str, object]:
            body = {"task": corpus.TASK.task_id, "files": SIMD, "compare_compile": None} | fields
            answer = httpx.post(f"{address}/v1/judgements?wait=60", json=body, timeout=150)
            assert answer.status_code == 200, answer.text
            speedup: dict[str, object] = answer.json()["verdict"]["speedup"]
            return speedup

        assert judged(against=slower(2_000_000))["against"] is not None
        assert judged()["against"] is None, "the same candidate, compared with eager alone"
