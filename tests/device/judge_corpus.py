"""Every exploit and every honest candidate on a device, one line each, then the figures' validity.

    python tests/device/judge_corpus.py [--device cuda] [--repeats 200] [--table FILE] [--set KEY=VALUE]
        [NAME...]

Needs torch and this project, no pytest. With NAMEs only those are judged, and nothing else is measured. A
candidate that is faster than eager is also compared with torch.compile in its default mode. FILE is complete
up to the last line that was printed, so a run that is cut off leaves a table too.
Ends with 1 unless every line is OK; lines marked `open` are exploits that are known to gain more than they
may, and count apart.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import judge_fixtures as corpus
import judge_validity
import torch

from components.core.config import resolve
from components.core.errors import InfrastructureError
from components.judge.judge import Judge
from components.judge.verdict import Rejected, Verdict, counter_lines


def judged(
    judge: Judge,
    group: str,
    name: str,
    limits: dict[str, float] | None = None,
) -> Verdict:
    """The verdict; the judge's own failure is one too, as the pool makes of it."""
    sandbox = judge.params.sandbox
    judge.params = judge.params.model_copy(update={"sandbox": sandbox.model_copy(update=limits or {})})
    judge.builder.sandbox = judge.params.sandbox
    try:
        return judge.verdict(corpus.task(group, name), corpus.files(group, name))
    except InfrastructureError as error:
        return Verdict(status="infrastructure", reason="judge", log=str(error)[:500])
    finally:
        judge.params = judge.params.model_copy(update={"sandbox": sandbox})
        judge.builder.sandbox = sandbox


def prebuild(judge: Judge, chosen: Iterable[tuple[str, str]]) -> None:
    """Build candidates, given by group and name, side by side, so that judging them in turn is shorter.

    Candidates with a limit of their own for the build are left out.
    """

    def build(candidate: tuple[str, str]) -> None:
        group, name = candidate
        if group.startswith("honest") or "build_seconds" not in corpus.expected(name, group):
            with contextlib.suppress(Rejected, InfrastructureError):
                judge.builder.build(corpus.files(group, name))

    with ThreadPoolExecutor(judge.params.sandbox.build_workers) as workers:
        list(workers.map(build, chosen))


def eager_speedup(verdict: Verdict) -> float:
    return verdict.speedup.eager.estimate if verdict.speedup.eager else 0.0


HEAD = (
    "| candidate | as expected | verdict | of eager | at most | of torch.compile |\n"
    "| --- | --- | --- | --- | --- | --- |\n"
)


def line(table: Path | None, name: str, expected: str, verdict: Verdict, seconds: float, mark: str) -> None:
    """Print the line of one candidate, and append it as a row to the file `table`."""
    ratios = [
        f"{ratio.estimate:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else "-"
        for ratio in (verdict.speedup.eager, verdict.speedup.compile)
    ]
    print(
        f"{mark:5} {name:42} {expected:34} {verdict.status + ' ' + verdict.reason:40.40} {ratios[0]:22}"
        f" {ratios[1]:22} {seconds:6.1f}",
        flush=True,
    )
    limit = expected.partition("<= ")[2]
    if table is not None:
        with table.open("a") as rows:
            rows.write(
                f"| `{name}` | {mark} | {verdict.status} {verdict.reason} | {ratios[0]} | {limit or '-'} |"
                f" {ratios[1]} |\n"
            )
    if mark == "FAIL" and verdict.log:
        print("      " + verdict.log.strip()[-400:].replace("\n", "\n      "), flush=True)


def honest(judge: Judge, names: list[str], suffix: str, table: Path | None) -> list[str]:
    marks = []
    for name in names:
        started = time.monotonic()
        verdict = judged(judge, f"honest{suffix}", name)
        unread = "error" in verdict.evidence.get("counters", {})
        marks.append("OK" if verdict.status == "correct" and not unread else "FAIL")
        line(table, f"honest/{name}", "correct", verdict, time.monotonic() - started, marks[-1])
        print(*(f"      {text}\n" for text in counter_lines(verdict)), sep="", end="", flush=True)
    return marks


def hostile(judge: Judge, names: list[str], suffix: str, table: Path | None) -> list[str]:
    marks = []
    for name in names:
        wanted, started = corpus.expected(name, f"exploits{suffix}"), time.monotonic()
        limits = {limit: wanted[limit] for limit in ("run_seconds", "build_seconds") if limit in wanted}
        verdict = judged(judge, f"exploits{suffix}", name, limits)
        good = answered = verdict.status in wanted["status"].split("|") and verdict.reason.startswith(
            wanted["reason"]
        )
        says = f"{wanted['status']} {wanted['reason']}"
        if good and "times_honest" in wanted and verdict.status == "correct":
            plain = "plain" if suffix else "simd"
            for _ in range(3):  # a measurement can be off on a busy machine, a gain comes again
                limit = wanted["times_honest"] * eager_speedup(
                    judged(judge, f"honest{suffix}", wanted.get("honest", plain))
                )
                good = verdict.status == "correct" and eager_speedup(verdict) <= limit
                if good:
                    break
                verdict = judged(judge, f"exploits{suffix}", name, limits)
            says = f"{says} <= {limit:.2f}x"
        marks.append("OK" if good else "open" if answered and "open" in wanted else "FAIL")
        line(table, name, says, verdict, time.monotonic() - started, marks[-1])
    return marks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--repeats", type=int, default=200, help="comparisons of each kind for the measurement's own validity"
    )
    parser.add_argument("--table", type=Path, help="write the lines as a table in Markdown")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a parameter")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    suffix = "_cuda" if arguments.device == "cuda" else ""
    free = torch.cuda.mem_get_info()[0] if suffix else 0
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(
            resolve("smoke" if suffix else "ci", (f"device={arguments.device}", *arguments.set)).params,
            Path(folder),
        )
        try:

            def chosen(group: str) -> list[str]:
                return [
                    n for n in corpus.names(group + suffix) if not arguments.names or n in arguments.names
                ]

            print(
                f"{'':5} {'name':42} {'expected':34} {'got':40} {'eager':22} {'compile':22} seconds",
                flush=True,
            )
            if arguments.table:
                arguments.table.write_text(HEAD)
            groups = ("exploits", "honest")
            prebuild(judge, [(group + suffix, name) for group in groups for name in chosen(group)])
            alone = [
                name
                for name in chosen("exploits")
                if corpus.expected(name, "exploits" + suffix).get("together", 1) == 1
            ]
            marks = hostile(judge, alone, suffix, arguments.table)
            started = time.monotonic()
            marks += honest(judge, chosen("honest"), suffix, arguments.table)
            judged_in = time.monotonic() - started
            if not arguments.names:
                # The sentinel: nothing that came before has harmed the judge.
                marks += honest(judge, ["plain" if suffix else "simd"], suffix, arguments.table)
                print(
                    f"{3600 * len(chosen('honest')) / judged_in:.0f} honest candidates an hour, one after the"
                    " other",
                    flush=True,
                )
                judge_validity.report(judge, arguments.repeats)
        finally:
            judge.close()
    if suffix:
        torch.cuda.empty_cache()
        left = free - torch.cuda.mem_get_info()[0]  # but for what torch's own libraries took in this process
        own = torch.cuda.memory_reserved()
        print(
            f"device memory in use after the judge is closed: {left / 2**20:.0f} MiB more than before it was"
            f" made, {own / 2**20:.0f} of them torch's"
        )
    print(f"{marks.count('OK')} OK, {marks.count('FAIL')} FAIL, {marks.count('open')} open")
    return 1 if "FAIL" in marks else 0


if __name__ == "__main__":
    sys.exit(main())
