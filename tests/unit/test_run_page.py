"""The record of a run as Markdown."""

from flows.run_page import gates_table, markdown_table, stages_table, verdict

NOTHING = {"pass_rate": 0.0, "faster_rate": {"eager": 0.0, "compile": 0.0}}
RECORD = {
    "dataset": {"version": "d" * 64, "cached": True, "seconds": 1.0},
    "stages": [
        {
            "name": "warmup",
            "checkpoint": "/home/stages/warmup-0123456789ab/checkpoint",
            "digest": "a" * 64,
            "cached": False,
            "reward_before": None,
            "reward_after": 0.25,
            "seconds": 75.0,
        }
    ],
    "cold_start": NOTHING | {"tasks": 4, "geomean": {"eager": None, "compile": None}},
    "evaluation": NOTHING | {"tasks": 4, "pass_rate": 0.5, "geomean": {"eager": 1.5, "compile": 1.25}},
    "model": {"name": "cuda-agent", "version": "3"},
    "gate": {
        "verdict": "refused",
        "reasons": ["pass_rate is 0.5: that is 0.1 short of 0.6."],
        "gates": [
            {"name": "pass_rate", "value": 0.5, "low": 0.1, "high": 0.9, "threshold": 0.6, "passed": False}
        ],
    },
}


def test_a_stage_is_a_row_with_its_checkpoint() -> None:
    rows = stages_table(RECORD).splitlines()
    assert rows[2] == "| dataset | yes | 1s |  |  | dddddddddddd |"
    assert rows[3] == "| warmup | no | 1m15s | – | 0.25 | `aaaaaaaaaaaa` in warmup-0123456789ab |"


def test_the_verdict_comes_first_with_its_reasons_and_both_evaluations() -> None:
    lines = verdict(RECORD).splitlines()
    assert lines[0] == "**cuda-agent version 3: refused**"
    assert "- pass_rate is 0.5: that is 0.1 short of 0.6." in lines
    assert "| after | 50% | 0% | 0% | 1.50x | 1.25x |" in lines


def test_a_failed_gate_stands_out() -> None:
    assert "| pass_rate | **failed** | 0.5 | 0.1 to 0.9 | 0.6 |" in gates_table(RECORD)


def test_a_bar_in_a_cell_begins_no_column() -> None:
    assert markdown_table(["a"], [["x|y"]]).endswith("| x\\|y |")


def test_the_evaluation_before_training_is_named_after_the_policy_that_the_night_started_from() -> None:
    assert "| before |" in verdict(RECORD), "an earlier release did not record it"
    assert "| before (cold start) |" in verdict(RECORD | {"night": {"start": "scratch"}})
    assert "| before (version 2) |" in verdict(RECORD | {"night": {"start": "version 2"}})
