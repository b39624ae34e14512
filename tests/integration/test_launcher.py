"""Ranks of one host: the first that fails says why, and SIGTERM gives all of them time to save."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from components.core.errors import StageFailed, UserError
from components.training.launcher import TERMINATED, launch

FAILS = """
import os, sys, time
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from components.core.errors import StageFailed, UserError
from components.training.run_stage import RankLost
if os.environ["RANK"] == "1":
    get_error_handler().record_exception({error})
else:
    while not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"].replace("rank-0", "rank-1")):
        time.sleep(0.05)
    get_error_handler().record_exception(RankLost("another rank died"))
    sys.exit(1)
time.sleep(2)
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (
            "StageFailed('critic: too little')",
            StageFailed,
            r"rank 1 of 2 failed: critic: too little .*rank-1\.log",
        ),
        ("UserError('critic: no trajectory')", UserError, "^critic: no trajectory$"),
        ("ValueError('a bad\\n  shape')", StageFailed, "rank 1 of 2 failed: ValueError: a bad shape"),
    ],
)
def test_the_error_of_the_rank_that_failed_is_told_not_that_of_one_which_lost_it(
    error: str, kind: type[Exception], sentence: str, tmp_path: Path
) -> None:
    """Rank 0 ends first, because rank 1 is gone."""
    with pytest.raises(kind, match=sentence):
        launch([sys.executable, "-c", FAILS.format(error=error)], 2, tmp_path / "logs")


def test_a_rank_that_recorded_nothing_is_told_by_the_end_of_its_log(tmp_path: Path) -> None:
    program = "import os, sys, time; time.sleep(1 - int(os.environ['RANK'])); sys.exit('out of luck')"
    with pytest.raises(
        StageFailed, match=r"rank 1 of 2 died by exit code 1 \(see .*rank-1\.log\);(.|\n)*out of luck"
    ):
        launch([sys.executable, "-c", program], 2, tmp_path / "logs")


def test_an_error_of_an_earlier_run_is_forgotten(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        program = FAILS.format(error="UserError('no trajectory')")
        launch([sys.executable, "-c", program], 2, tmp_path / "logs")
    with pytest.raises(StageFailed, match="rank 0 of 2 died by exit code 7"):
        launch([sys.executable, "-c", "raise SystemExit(7)"], 2, tmp_path / "logs")


def test_after_sigterm_the_ranks_have_the_time_that_they_need(tmp_path: Path) -> None:
    """Torchrun's agent would kill them after its shutdown timeout, and end with another exit code."""
    program = f"""
import os, signal, sys, time
def save(*_):
    time.sleep(2 + 6 * int(os.environ["RANK"] == "0"))  # longer than the launcher waits after a failed rank
    open({str(tmp_path)!r} + "/saved-" + os.environ["RANK"], "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
open({str(tmp_path)!r} + "/" + os.environ["RANK"], "w").close()
time.sleep(60)
"""

    def terminate() -> None:
        while not all((tmp_path / str(rank)).exists() for rank in range(2)):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    assert launch([sys.executable, "-c", program], 2, tmp_path / "logs") == TERMINATED
    thread.join()
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))
