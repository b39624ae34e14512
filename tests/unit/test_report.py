"""The report: complete, self-contained, and safe to open although it shows what a policy wrote."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from components.core.errors import UserError
from components.core.files import write_json
from components.evaluation.metrics import by_level, summarise
from components.evaluation.report import load_report_data, write_report
from components.evaluation.results import Attempt, Evaluation, Measurement, TaskResult
from components.evaluation.tables import figure
from components.judge.verdict import Ratio, Seconds, Speedup, Status, Verdict, milestone
from components.registry.gates import Gate

EVIL = (
    '</pre></script><script>alert(1)</script><img src=x onerror=alert(2)><a href="http://example.com">{{ 7 *'
    " 7 }}"
)


def evaluation(eager: list[float | None], hostile: str = "") -> Evaluation:
    rows = []
    for index, estimate in enumerate(eager):
        ratio = (
            None if estimate is None else Ratio(estimate=estimate, low=estimate * 0.9, high=estimate * 1.1)
        )
        speedup = Speedup(eager=ratio, compile=ratio)
        status: Status = "wrong_output" if estimate is None else "correct"
        rows.append(
            TaskResult(
                task_id=f"{index:016x}",
                name=f"task {index}{hostile}",
                ops=("relu",),
                level=1 + index % 2,
                status=status,
                reason=hostile,
                milestone=milestone(Verdict(status=status, speedup=speedup)),
                speedup=speedup,
                seconds=Seconds(
                    candidate=1e-3 / estimate if estimate else None, eager=1e-3, compile=1e-3, limit=2e-4
                ),
                attempts=(
                    Attempt(status=status, reward=1, first=Measurement(status=status, eager=estimate)),
                ),
                source=f"class Model: ...  # {hostile}",
                files={f"kernels/forward.cpp{hostile}": f"KERNEL(forward) {{}} // {hostile}"},
            )
        )
    return Evaluation(
        suite="held-out" + hostile,
        suite_digest="0" * 64,
        policy="policy",
        policy_digest="1" * 64,
        device="cpu",
        precision="strict-fp32",
        epoch="evaluation",
        seed=0,
        tasks=tuple(rows),
        overall=summarise(rows),
        levels=by_level(rows),
        errors=0,
    )


def gate(name: str, value: float, low: float, high: float, *, threshold: float) -> dict[str, object]:
    """Return a failed gate as the report of a run gets it."""
    made = Gate(name=name, value=value, low=low, high=high, threshold=threshold, passed=False)
    return made.model_dump() | {"decisive": made.decisive}


def report(
    folder: Path,
    before: list[float | None] | None,
    after: list[float | None],
    hostile: str = "",
) -> str:
    """Write a run's files, collect them, and give the report's text."""
    dataset, stage = folder / "dataset", folder / "warmup"
    write_json(
        dataset / "metrics.json",
        {"candidates": 40, "admitted": 28, "rejected": {"duplicate" + hostile: 12}, "version": "v"},
    )
    stage.mkdir()
    steps = [
        {"step": i, "reward": 0.1 * i, "m_-1": 0.4, "m_1": 0.3, "m_2": 0.2, "m_3": 0.1} for i in range(5)
    ]
    (stage / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    write_json(stage / "stage.json", {"reward_before": 0.0, "reward_after": 0.4, "seconds": 12.5})
    write_json(folder / "after" / "results.json", evaluation(after, hostile).model_dump(mode="json"))
    if before is not None:
        write_json(folder / "before" / "results.json", evaluation(before).model_dump(mode="json"))
    data = load_report_data(
        dataset,
        {"warmup" + hostile: stage},
        folder / "before" if before is not None else None,
        folder / "after" / "results.json",
        [
            gate("pass_rate", 0.5, 0.25, 0.75, threshold=0.75),
            gate("start.attempts_mean_reward", -1.57, -2.57, -0.57, threshold=0.0),
            gate("change.geomean.eager", 0.5, 0.25, 0.75, threshold=0.62),
        ],
        {
            "run_id": "r1" + hostile,
            "verdict": "refused",
            "reasons": ["pass_rate fell short" + hostile],
            "environment": {"torch": "2" + hostile},
        },
    )
    write_report(folder / "report.html", data)
    return (folder / "report.html").read_text()


class Tags(HTMLParser):
    """Every tag with its attributes, and which tags stayed open."""

    VOID = frozenset({"meta", "link", "br", "img", "circle", "rect", "line", "polyline", "polygon", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        # HTML lets a p or a table row end by itself; everything else must be closed in order.
        while self.open and self.open[-1] != tag:
            assert self.open.pop() in {"p", "td", "th", "tr", "tbody", "li"}, tag
        self.open.pop()


def test_the_report_shows_the_verdict_and_figures_before_and_after(tmp_path: Path) -> None:
    text = report(tmp_path, [None, 0.5, None, None], [4.0, 2.0, 0.5, None])
    assert "refused" in text and "pass_rate fell short" in text
    assert "75.0%" in text and "was 25.0%" in text and "+50.0 points" in text
    assert "50.0% short" in text, "the gate says by how much its lower end fell short"
    assert "0.57 short" in text, "a change from the start is short by its upper end"
    assert "0.12× short" in text, "a change from the champion is short by the figure itself"
    assert "reported, not measured here" in text and "98.8%" in text
    assert "KERNEL(forward) {}" in text


def test_the_papers_rows_stand_beside_this_run_and_are_marked(tmp_path: Path) -> None:
    text = report(tmp_path, [1.0, 1.0], [4.0, 2.0, 0.5, None])
    figures = json.loads((tmp_path / "report.json").read_text())
    rows = figures["table_1"]
    assert [row["set"] for row in rows] == ["overall"] * 8 + ["1"] * 8 + ["2"] * 8
    assert {row["note"] for row in rows if not row["model"].startswith("this run")} == {
        "reported, not measured here"
    }
    assert text.count("reported, not measured here") == 18 and "Claude Opus 4.5" in text
    mine = next(row for row in rows if row["model"] == "this run")
    assert mine["figures"]["pass_rate"] == figures["overall"]["pass_rate"] == 0.75


def test_best_and_worst_are_shown_and_degenerate_tasks_apart(tmp_path: Path) -> None:
    found = evaluation([float(i) for i in range(1, 25)] + [None])
    rows = [
        row.model_copy(update={"degenerate": "zeros_pass"}) if row.task_id == f"{23:016x}" else row
        for row in found.tasks
    ]
    write_json(
        tmp_path / "results.json", found.model_copy(update={"tasks": tuple(rows)}).model_dump(mode="json")
    )
    write_json(tmp_path / "cost.json", {"episodes": 12.5})
    write_report(tmp_path / "report.html", load_report_data(tmp_path, {}, None, tmp_path, [], {}))
    figures = json.loads((tmp_path / "report.json").read_text())
    assert [int(task, 16) for task in figures["best"]] == list(range(22, 12, -1)), (
        "the fastest of all is degenerate"
    )
    assert [int(task, 16) for task in figures["worst"]] == [24, *range(9)]
    assert (
        figures["degenerate"] == {f"{23:016x}": "zeros_pass"} and figures["without_degenerate"]["tasks"] == 24
    )
    assert figures["device_seconds"] == {"evaluation after, episodes": 12.5}
    text = (tmp_path / "report.html").read_text()
    assert "<h2>Degenerate tasks</h2>" in text and "degenerate: zeros_pass" in text and "12.5" in text


def test_every_picture_is_there(tmp_path: Path) -> None:
    text = report(tmp_path, [0.5, 0.5, None, 1.0], [4.0, 2.0, 0.5, None])
    charts = [
        attributes["aria-label"]
        for tag, attributes in Tags(text).seen
        if tag == "svg" and attributes.get("class") == "chart"
    ]
    assert charts == [
        "speed-up against eager",
        "speed-up against torch.compile",
        "share correct and > p× as fast by p",
        "share correct and > p× as fast by p",
        "share of the limit by task, by what the baseline attains",
        "mean reward by step",
        "milestone shares by step",
        "bars",
    ]


def test_the_report_needs_nothing_from_outside(tmp_path: Path) -> None:
    text = report(tmp_path, [1.0], [2.0])
    for tag, attributes in Tags(text).seen:
        assert tag not in {"link", "iframe", "img", "object", "embed"}
        assert not {"src", "href", "srcset", "action"} & set(attributes), (tag, attributes)
    assert "url(" not in text and "@import" not in text
    assert not re.search(r"https?://", text)


def test_what_a_policy_wrote_stays_text(tmp_path: Path) -> None:
    text = report(tmp_path, [1.0, 1.0], [2.0, None], hostile=EVIL)
    tags = Tags(text)
    assert sum(tag == "script" for tag, _ in tags.seen) == 1
    assert not any(tag in {"img", "a"} for tag, _ in tags.seen)
    assert "49" not in text[text.index("<h2>Best") :].replace("{{ 7 * 7 }}", ""), "sources are no templates"
    assert not any(name.startswith("on") for _, attributes in tags.seen for name in attributes)


def test_all_tags_are_closed(tmp_path: Path) -> None:
    assert Tags(report(tmp_path, [1.0, 1.0], [2.0, None], hostile=EVIL)).open == []


def test_its_own_script_is_the_only_one_that_may_run(tmp_path: Path) -> None:
    text = report(tmp_path, None, [2.0])
    script = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(
        attributes["content"]
        for tag, attributes in Tags(text).seen
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None and "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize("after", [[None, None], [1e-9, 1e9], [1.0]])
def test_nothing_solved_and_extremes_still_give_a_report(tmp_path: Path, after: list[float | None]) -> None:
    assert not re.search(r"\b(nan|inf)\b", report(tmp_path, None, after).rpartition("<script>")[0])


def test_a_run_without_figures_leaves_pictures_out_but_a_missing_evaluation_is_refused(
    tmp_path: Path,
) -> None:
    write_json(tmp_path / "results.json", evaluation([2.0]).model_dump(mode="json"))
    write_report(
        tmp_path / "report.html", load_report_data(tmp_path, {"warmup": tmp_path}, None, tmp_path, [], {})
    )
    assert "Not decided" in (tmp_path / "report.html").read_text()
    with pytest.raises(UserError, match=r"(nothing|results\.json): cannot be read .*; evaluate again"):
        load_report_data(tmp_path, {}, None, tmp_path / "nothing", [], {})
    (tmp_path / "metrics.json").write_text('{"admitted": 3')
    with pytest.raises(UserError, match=r"metrics\.json: cannot be read .* build the data set again"):
        load_report_data(tmp_path, {}, None, tmp_path, [], {})


def test_the_figures_of_gates_have_the_units_of_their_figure() -> None:
    names = ("start.faster_rate.eager", "change.pass_rate", "attempts_pass_rate", "start.geomean.compile")
    assert [figure(0.25, name) for name in names] == ["25.0%", "25.0%", "25.0%", "0.25×"]
    assert figure(0.25, "start.attempts_mean_reward") == "0.25"
