"""The examples of the documents do what the documents say."""

import re
from pathlib import Path

from components.core.config import PROJECT, resolve
from components.judge.candidate_folder import judge_workdir


def test_following_the_kernel_page_gives_a_correct_verdict(tmp_path: Path) -> None:
    text = (PROJECT / "docs" / "kernel-user.md").read_text()
    (tmp_path / "kernels").mkdir()
    for name, source in zip(
        ("model.py", "model_new.py", "kernels/forward.cpp"),
        re.findall(r"```(?:python|cpp)\n(.*?)```", text, re.DOTALL),
        strict=True,
    ):
        (tmp_path / name).write_text(source)
    verdict = judge_workdir(resolve("ci").params, tmp_path, None, tmp_path / "judge")
    assert (verdict.status, verdict.reason) == ("correct", "")
    assert verdict.speedup.eager is not None and verdict.speedup.compile is not None
