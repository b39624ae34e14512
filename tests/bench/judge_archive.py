"""Judge a published archive of kernels for KernelBench's tasks: what it claims, beside what is measured.

    python tests/bench/judge_archive.py ARCHIVE --out FOLDER [--device cuda] [--inline] [--level 1] \
        [--limit 20] [--rules kernel-only] [--default-mode]

ARCHIVE is a file of JSON lines, or a folder of such files, as the authors publish them. Each line has
`level_id`, `task_id`, `ref_code` (the task), `custom_code` (one Python file, or null) and `score_default`
(the claimed speed-up over eager). The archive is read where it is and not copied.

Every kernel is judged by both rules, or by those of `--rules`, and both tolerances, with weights by seed. It
is compared with the fastest mode of torch.compile on its task, whose compilation takes most of the time, or
by `--default-mode` with the default one. A file whose extension does not compile, and that catches the error,
answers without its kernel; such files are counted. OUT gets `rows.jsonl` (one line a kernel and label),
`table.md` and `plot.svg`. Verdicts are kept in OUT/verdicts, so the same command goes on where it was
interrupted.
"""

import argparse
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from components.core.config import resolve
from components.core.errors import UserError
from components.core.params import Params
from components.core.task import KernelTask
from components.judge.pool.local_pool import Candidate, Job
from components.judge.pool.open_pool import open_pool
from components.judge.verdict import Labels, Verdict

FIELDS = ("level_id", "task_id", "ref_code", "custom_code", "score_default")
COMBINATIONS = tuple(itertools.product(("kernel-only", "any"), ("strict", "kernelbench")))


def read_archive(path: Path) -> list[dict[str, Any]]:
    """Return the entries of all files of an archive that have a kernel.

    Raises UserError, which names the file and the line, if one is not an entry.
    """
    files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise UserError(f"{path}: no archive; give a file of JSON lines, or a folder of such files.")
    entries = []
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            try:
                entry = json.loads(line)
                missing = [field for field in FIELDS if field not in entry]
            except (ValueError, TypeError) as error:
                raise UserError(f"{file}:{number}: not a JSON object ({error}).") from error
            if missing:
                raise UserError(f"{file}:{number}: lacks {', '.join(missing)}; it is no entry of an archive.")
            if entry["custom_code"]:
                entries.append(entry)
    return entries


def labelled(params: Params, rules: str, tolerance: str) -> Params:
    labels = Labels.model_validate({"rules": rules, "tolerance": tolerance, "weights": "seed"})
    return params.model_copy(update={"sandbox": params.sandbox.model_copy(update=labels.model_dump())})


def judged(entries: Sequence[dict[str, Any]], params: Params, out: Path) -> Iterator[dict[str, Any]]:
    """Yield one row for each entry, judged with the labels of `params`."""
    pool = open_pool(params, out / "verdicts")
    try:
        futures = [
            pool.submit(
                Job(
                    KernelTask(code=entry["ref_code"]),
                    Candidate.of({"model_new.py": entry["custom_code"]}),
                    "archive",
                    compare_compile=True,
                )
            )
            for entry in entries
        ]
        for entry, future in zip(entries, futures, strict=True):
            yield row(entry, future.result(), Labels.of(params.sandbox))
    finally:
        pool.close()


def row(entry: dict[str, Any], verdict: Verdict, labels: Labels) -> dict[str, Any]:
    return {
        "level": entry["level_id"],
        "task": entry["task_id"],
        "labels": labels.model_dump(),
        "claimed": entry["score_default"],
        "status": verdict.status,
        "reason": verdict.reason,
        "eager": verdict.speedup.eager.model_dump() if verdict.speedup.eager else None,
        "compile": verdict.speedup.compile.model_dump() if verdict.speedup.compile else None,
        "not_built": verdict.evidence.get("extensions_not_built", []),
        "device": verdict.evidence.get("device", ""),
    }


def of_labels(rows: Sequence[dict[str, Any]], rules: str, tolerance: str) -> list[dict[str, Any]]:
    return [r for r in rows if (r["labels"]["rules"], r["labels"]["tolerance"]) == (rules, tolerance)]


def geomean(values: Sequence[float]) -> str:
    positive = [value for value in values if value > 0]
    return f"{math.exp(sum(map(math.log, positive)) / len(positive)):.2f}" if positive else "–"


def markdown(head: Sequence[str], body: Sequence[Sequence[object]]) -> str:
    rows = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in rows) + "\n"


def interval(ratio: dict[str, float] | None) -> str:
    return f"{ratio['estimate']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else "–"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown of a table of figures and one of reasons by label, and of one of kernels."""
    figures, reasons = [], []
    for rules, tolerance in COMBINATIONS:
        group = of_labels(rows, rules, tolerance)
        right = [r for r in group if r["status"] == "correct"]
        faster = [sum(bool(r[name]) and r[name]["low"] > 1 for r in right) for name in ("eager", "compile")]
        claimed = geomean([r["claimed"] or 0 for r in right])
        measured = geomean([r["eager"]["estimate"] for r in right])
        without = sum(bool(r["not_built"]) for r in right)
        figures.append([rules, tolerance, len(group), len(right), without, *faster, claimed, measured])
        found = Counter(f"{r['status']} {r['reason']}".strip() for r in group if r["status"] != "correct")
        reasons += [[rules, tolerance, reason, count] for reason, count in found.most_common()]
    kernels = [
        [
            f"{r['level']}/{r['task']}",
            r["labels"]["rules"],
            r["labels"]["tolerance"],
            r["claimed"],
            *(interval(r[name]) for name in ("eager", "compile")),
        ]
        for r in rows
        if r["status"] == "correct"
    ]
    label = ["rules", "tolerance"]
    speeds = ["faster than eager", "faster than compile", "claimed by the correct", "measured"]
    return "\n".join(
        [
            markdown([*label, "kernels", "correct", "without their kernel", *speeds], figures),
            markdown([*label, "why not correct", "kernels"], reasons),
            markdown(["task", *label, "claimed", "against eager", "against compile"], kernels),
        ]
    )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the claimed speed-up over eager beside the measured one with its interval, by label."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 7))
    for (rules, tolerance), marker in zip(COMBINATIONS, "os^d", strict=True):
        shown = [r for r in of_labels(rows, rules, tolerance) if r["eager"] and r["claimed"]]
        estimates = [r["eager"]["estimate"] for r in shown]
        low, high = (
            [abs(r["eager"][end] - r["eager"]["estimate"]) for r in shown] for end in ("low", "high")
        )
        axes.errorbar(
            [r["claimed"] for r in shown],
            estimates,
            yerr=[low, high],
            fmt=marker,
            label=f"{rules}, {tolerance}",
        )
    axes.axline((1, 1), slope=1, color="grey", linewidth=0.8)
    axes.axhline(1, color="grey", linewidth=0.8, linestyle=":")
    axes.set(
        xscale="log", yscale="log", xlabel="claimed speed-up over eager", ylabel="measured, 95 % interval"
    )
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def judge_archive(
    entries: Sequence[dict[str, Any]],
    params: Params,
    out: Path,
    only_rules: str | None = None,
) -> list[dict[str, Any]]:
    """Judge all entries, by both rules or `only_rules`; write the files of OUT, and return the rows."""
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with (out / "rows.jsonl").open("w", buffering=1) as lines:
        for rules, tolerance in COMBINATIONS:
            if only_rules not in (None, rules):
                continue
            for done in judged(entries, labelled(params, rules, tolerance), out):
                rows.append(done)
                lines.write(json.dumps(done) + "\n")
                print(
                    f"{done['level']}/{done['task']} {rules} {tolerance}: {done['status']} {done['reason']}",
                    flush=True,
                )
    (out / "table.md").write_text(table(rows))
    plot(rows, out / "plot.svg")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--inline", action="store_true", help="only kernels that call load_inline")
    parser.add_argument("--level", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--rules", choices=["kernel-only", "any"], help="judge by these rules only")
    parser.add_argument("--default-mode", action="store_true", help="of torch.compile, and no other")
    options = parser.parse_args()
    # Many files with torch's headers are built at once, so that one build takes minutes.
    modes = "default" if options.default_mode else "all"
    params = resolve(
        "smoke",
        (f"device={options.device}", "sandbox.build_seconds=600", f"sandbox.compile_modes={modes}"),
    ).params
    entries = [
        entry
        for entry in read_archive(options.archive)
        if (not options.inline or "load_inline" in entry["custom_code"])
        and options.level in (None, entry["level_id"])
    ]
    print(table(judge_archive(entries[: options.limit], params, options.out, options.rules)))


if __name__ == "__main__":
    main()
