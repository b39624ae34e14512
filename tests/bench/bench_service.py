"""Seconds that the HTTP service adds to a judgement, beside a local pool with the same judge, in one run.

    python tests/bench/bench_service.py [--device cpu] [--pairs 40] [--measured 8] [--home FOLDER]

Every pair judges two candidates that differ in a comment, one by a pool and one over HTTP (a POST that waits
for the verdict), in turn first. Rows: `refused` are candidates that the screen refuses, where the judge's own
work is milliseconds; `measured` are timed, slower than eager; `known` are verdicts that are in both journals.
Prints, in milliseconds, the medians, the median of the paired differences with its 95 % interval, and the CPU
time of this process that a judgement over HTTP takes beyond one by the pool. The process has pool, service
and client. On a loaded machine the CPU time is the figure to read.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

import judge_fixtures as corpus

from components.core.config import resolve
from components.core.params import Params
from components.judge.judge import Judge
from components.judge.pool.local_pool import Candidate, Job, LocalPool
from components.judge.verdict import Verdict
from components.service.jobs import JobService
from components.service.judges import WarmJudges
from components.service.server import bind, serving


class SameJudgePool(LocalPool):
    """Local pool that judges with a judge that is there already."""

    def __init__(self, params: Params, verdicts: Path, judge: Judge):
        super().__init__(params, verdicts)
        self._judge = judge


def interval(values: list[float]) -> tuple[float, float]:
    """Return the order statistics that enclose the median with a probability of about 95 %."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    middle = (len(values) - 1) / 2
    return ordered[max(0, int(middle - half))], ordered[min(len(values) - 1, int(middle + half + 1))]


def compare(
    name: str, pairs: int, ways: dict[str, Callable[[dict[str, str]], str]], files: dict[str, str]
) -> None:
    """Judge pairs of candidates that differ in a comment, and print one row."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    cpu = dict.fromkeys(ways, 0.0)
    for number in range(pairs + 1):
        order = list(ways) if number % 2 else list(reversed(ways))
        for way in order:
            # A known verdict is that of the warm-up pair.
            text = f"{files['model_new.py']}\n# {name} {way} {0 if name == 'known' else number}\n"
            started, cpu_started = time.perf_counter(), time.process_time()
            status = ways[way](files | {"model_new.py": text})
            took, cpu_took = time.perf_counter() - started, time.process_time() - cpu_started
            assert status in ("forbidden", "correct"), status
            if number:
                seconds[way].append(1000 * took)
                cpu[way] += 1000 * cpu_took / pairs
    local, there = (seconds[way] for way in ways)
    differences = [after - before for before, after in zip(local, there, strict=True)]
    low, high = interval(differences)
    medians = "".join(f"{statistics.median(seconds[way]):10.1f}" for way in ways)
    added = f"{statistics.median(differences):10.1f}{f'[{low:.1f}, {high:.1f}]':>18}"
    print(f"{name:10}{pairs:6}{medians}{added}{cpu['service'] - cpu['pool']:10.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--measured", type=int, default=8, help="pairs of measured candidates")
    parser.add_argument("--home", type=Path)
    chosen = parser.parse_args()
    home = chosen.home or Path(tempfile.mkdtemp())
    params = resolve("ci" if chosen.device == "cpu" else "smoke", [f"device={chosen.device}"]).params
    on_cuda = chosen.device == "cuda"
    task = corpus.CUDA_TASK if on_cuda else corpus.TASK
    slow = corpus.files("honest_cuda" if on_cuda else "honest", "slow")
    with contextlib.ExitStack() as stack:
        judges = stack.enter_context(contextlib.closing(WarmJudges(params, home / "judge")))
        judge = stack.enter_context(judges.using(params))
        pool = SameJudgePool(params, home / "local", judge)
        stack.callback(pool.threads.close)
        listener = stack.enter_context(bind("0", has_tokens=False))
        service = JobService(judges, params, home / "service", [task])
        stack.callback(service.close)
        stack.enter_context(serving(service, listener))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = stack.enter_context(httpx.Client(base_url=address, timeout=100))

        def here(files: dict[str, str]) -> str:
            verdict: Verdict = pool.submit(Job(task, Candidate.of(files), "0")).result()
            return verdict.status

        def there(files: dict[str, str]) -> str:
            request = {"task": task.task_id, "files": files}
            answer = client.post("/v1/judgements?wait=60", json=request)
            return str(answer.raise_for_status().json()["verdict"]["status"])

        ways = {"pool": here, "service": there}
        titles = f"{'pairs':>6}{'pool':>10}{'service':>10}{'added':>10}{'95 % interval':>18}{'CPU added':>10}"
        print(f"{'ms':10}{titles}")
        compare("known", chosen.pairs, ways, corpus.files("exploits", "exit_at_import"))
        compare("refused", chosen.pairs, ways, corpus.files("exploits", "exit_at_import"))
        compare("measured", chosen.measured, ways, slow)


if __name__ == "__main__":
    main()
