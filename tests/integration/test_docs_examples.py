"""The examples of the documents do what the documents say."""

import re
from pathlib import Path

from components.core.config import PROJECT
from components.core.task import load_task
from components.judge.candidate_folder import read_workspace
from components.judge.judge import Judge


def test_following_the_kernel_page_gives_a_correct_verdict(judge: Judge, tmp_path: Path) -> None:
    text = (PROJECT / "docs" / "kernel-user.md").read_text()
    (tmp_path / "kernels").mkdir()
    for name, source in zip(
        ("model.py", "model_new.py", "kernels/forward.cpp"),
        re.findall(r"```(?:python|cpp)\n(.*?)```", text, re.DOTALL),
        strict=True,
    ):
        (tmp_path / name).write_text(source)
    verdict = judge.verdict(load_task(tmp_path / "model.py"), read_workspace(tmp_path), compare_compile=True)
    assert (verdict.status, verdict.reason) == ("correct", "")
    assert verdict.speedup.eager is not None and verdict.speedup.compile is not None
