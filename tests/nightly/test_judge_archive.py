"""An archive of published kernels is judged by every label."""

import json
import sys
from pathlib import Path

import judge_fixtures as corpus
import pytest

from components.core.errors import UserError
from components.core.params import Params

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
import judge_archive


def test_an_archive_is_judged_by_every_label(ci_params: Params, tmp_path: Path) -> None:
    entry = {"level_id": 1, "ref_code": corpus.CODE, "score_default": 2.0}
    kernels = [corpus.TORCH_HONEST, corpus.TORCH_WRONG, None]
    lines = [json.dumps({**entry, "task_id": i, "custom_code": code}) for i, code in enumerate(kernels)]
    (tmp_path / "archive.json").write_text("\n".join(lines))
    entries = judge_archive.read_archive(tmp_path)
    assert len(entries) == 2, "an entry without a kernel is left out"
    rows = judge_archive.judge_archive(entries, ci_params, tmp_path / "out")
    found = {(r["task"], r["labels"]["rules"], r["labels"]["tolerance"]): r["status"] for r in rows}
    for rules, tolerance in judge_archive.COMBINATIONS:
        assert found[0, rules, tolerance] == ("forbidden" if rules == "kernel-only" else "correct")
        assert found[1, rules, tolerance] == ("forbidden" if rules == "kernel-only" else "wrong_output")
    table = (tmp_path / "out" / "table.md").read_text()
    assert (
        "| any | strict | 2 | 1 |" in table and "| any | strict | wrong_output max_error:given | 1 |" in table
    )
    assert "<svg" in (tmp_path / "out" / "plot.svg").read_text()
    (tmp_path / "archive.json").write_text('{"level_id": 1}')
    with pytest.raises(UserError, match=r"archive\.json:1: lacks task_id"):
        judge_archive.read_archive(tmp_path)
