"""Stages killed with SIGKILL and a rank that ends: the results are the same to the last bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_fixtures import stage

from components.core.config import PROJECT
from components.core.errors import StageFailed
from components.core.files import digest_tree, read_json
from components.training.launcher import launch

PROGRAM = PROJECT / "tests" / "fixtures" / "stage_process.py"
ENVIRONMENT = {"PYTHONPATH": f"{PROJECT}{os.pathsep}{PROGRAM.parent}", "OMP_NUM_THREADS": "1"}


def test_every_stage_killed_twice_ends_with_equal_bits(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), "kills", str(tmp_path)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    for name, record in read_json(tmp_path / "kills.json").items():
        first, second, last = record["codes"]
        # The second moment may lie before what the first attempt had finished; the run is then simply
        # complete.
        assert first == -9 and second in (-9, 0) and last == 0, (name, record)
        whole, killed = (tmp_path / kind / name for kind in ("whole", "killed"))
        assert digest_tree(killed / "checkpoint") == digest_tree(whole / "checkpoint"), (name, record)
        if name != "critic":
            assert digest_tree(killed / "trajectories") == digest_tree(whole / "trajectories"), (name, record)
        figures = [
            {key: value for key, value in read_json(folder / "stage.json").items() if key != "seconds"}
            for folder in (whole, killed)
        ]
        assert figures[0] == figures[1], (name, record)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_stage_killed_ten_times_samples_no_finished_trajectory_again_and_trains_on_each_once(
    staleness: int, tmp_path: Path
) -> None:
    ran = subprocess.run(
        [sys.executable, str(PROGRAM), "attempts", str(tmp_path), str(staleness)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    report = read_json(tmp_path / "attempts.json")
    assert report["codes"][0] == 0 and report["codes"][-1] == 0
    assert report["codes"].count(-9) == 10, report
    assert report["repeated"] == []
    whole, killed = (tmp_path / kind / "warmup" for kind in ("whole", "killed"))
    for out in (whole, killed):
        taken = [place.name for place in out.glob("trajectories/step-*/*")]
        assert len(taken) == len(set(taken)) == 3 * 32
        assert not (out / "sampling").exists()
    if staleness == 0:
        assert digest_tree(killed / "checkpoint") == digest_tree(whole / "checkpoint")
        assert digest_tree(killed / "trajectories") == digest_tree(whole / "trajectories")


def test_a_rank_that_dies_leaves_the_last_good_state_and_two_ranks_go_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for kind in ("whole", "killed"):
        stage(tmp_path / kind, "warmup")  # rank 0 and 1 must not both make the inputs
    command = [sys.executable, str(PROGRAM), "rank"]
    with pytest.raises(StageFailed, match="rank 1 of 2 died by signal SIGKILL"):
        launch([*command, str(tmp_path / "killed"), "2"], 2, tmp_path / "logs")
    kept = sorted(folder.name for folder in (tmp_path / "killed" / "warmup" / "state").iterdir())
    assert kept == ["step-0001-float32-zero1-world2", "step-0002-float32-zero1-world2"]
    for kind in ("whole", "killed"):
        launch([*command, str(tmp_path / kind)], 2, tmp_path / "logs")
    digests = [digest_tree(tmp_path / kind / "warmup" / "checkpoint") for kind in ("whole", "killed")]
    assert digests[0] == digests[1]
