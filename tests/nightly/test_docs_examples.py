"""The examples of the documents do what the documents say."""

import os
import re
import subprocess
import sys
from pathlib import Path

from components.core.config import PROJECT
from components.core.task import load_task
from components.judge.candidate import read_workspace
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


def test_the_loop_in_one_file_trains_on_measured_rewards_and_evaluates() -> None:
    script = PROJECT / "docs" / "examples" / "one_loop.py"
    assert len(script.read_text().splitlines()) <= 250
    sizes = ("--tasks", "2", "--samples", "6", "--steps", "2")
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), *sizes],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    steps = re.findall(
        r"step \d of 2: (\d+) of 12 answers correct, mean reward (\S+), gradient norm (\S+)", done.stdout
    )
    assert len(steps) == 2 and any(float(norm) > 0 for _, _, norm in steps), done.stdout
    assert any(int(correct) for correct, _, _ in steps), done.stdout
    for correct, reward, _ in steps:
        # A wrong answer is worth -1 and a correct one 1, or 2 if it is faster than eager PyTorch.
        assert -12 + 2 * int(correct) <= 12 * float(reward) + 0.01
        assert 12 * float(reward) - 0.01 <= -12 + 3 * int(correct)
    (distance,) = re.findall(r"the weights moved by (\S+)", done.stdout)
    assert float(distance) > 0
    assert re.search(r"evaluation: [012] of 2 tasks correct, \d+% faster than eager PyTorch", done.stdout)
