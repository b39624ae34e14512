"""Ranks of one host: the first that fails says why, and SIGTERM gives all of them time to save."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from prefect_fixtures import wait_for
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from components.core.config import PROJECT
from components.core.errors import StageFailed, UserError
from components.training.launcher import LAUNCHED, TERMINATED, launch
from components.training.run_stage import RankLost

PROGRAM = """
import os, shutil, sys, time
own = os.environ["TORCHELASTIC_ERROR_FILE"]
while os.environ["RANK"] == "0" and not os.path.exists(own.replace("/0/", "/1/")):
    time.sleep(0.05)
shutil.copyfile(os.path.join(sys.argv[1], os.environ["RANK"]), own)
time.sleep(int(os.environ["RANK"]))
sys.exit(1)
"""


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Restore the handlers of signals that torchrun's agent replaces."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], list[str]]:
    """Return the command of ranks of which rank 1 fails with an error, and rank 0 because rank 1 is lost.

    torch's own handler writes the records of both errors, here and once, since each rank would import torch.
    """

    def command(error: Exception) -> list[str]:
        for rank, recorded in enumerate((RankLost("another rank died"), error)):
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank)))
            get_error_handler().record_exception(recorded)
        return [sys.executable, "-c", PROGRAM, str(tmp_path)]

    return command


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (
            StageFailed("critic: too little"),
            StageFailed,
            r"rank 1 of 2 failed: critic: too little .*1/stderr\.log",
        ),
        (UserError("critic: no trajectory"), UserError, "^critic: no trajectory$"),
        (ValueError("a bad\n  shape"), StageFailed, "rank 1 of 2 failed: ValueError: a bad shape"),
    ],
)
def test_the_error_of_the_rank_that_failed_is_told_not_that_of_one_which_lost_it(
    error: Exception,
    kind: type[Exception],
    sentence: str,
    failing: Callable[[Exception], list[str]],
    tmp_path: Path,
) -> None:
    """Rank 0 ends first, because rank 1 is gone."""
    with pytest.raises(kind, match=sentence):
        launch(failing(error), 2, tmp_path / "logs")


def test_a_rank_that_recorded_nothing_is_told_by_the_end_of_its_log(tmp_path: Path) -> None:
    program = "import os, sys, time; time.sleep(60 * (os.environ['RANK'] == '0')); sys.exit('out of luck')"
    with pytest.raises(
        StageFailed, match=r"rank 1 of 2 died by exit code 1 \(see .*1/stderr\.log\);(.|\n)*out of luck"
    ):
        launch([sys.executable, "-c", program], 2, tmp_path / "logs")


def test_an_error_of_an_earlier_run_is_forgotten(
    failing: Callable[[Exception], list[str]], tmp_path: Path
) -> None:
    with pytest.raises(UserError):
        launch(failing(UserError("no trajectory")), 2, tmp_path / "logs")
    with pytest.raises(StageFailed, match="rank 0 of 2 died by exit code 7"):
        program = "import os, time; time.sleep(60 * int(os.environ['RANK'])); raise SystemExit(7)"
        launch([sys.executable, "-c", program], 2, tmp_path / "logs")


def test_after_sigterm_the_ranks_have_the_time_that_they_need(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys, time
def save(*_):
    time.sleep(3 * (os.environ["RANK"] == "0"))
    open({str(tmp_path)!r} + "/saved-" + os.environ["RANK"], "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
open({str(tmp_path)!r} + "/" + os.environ["RANK"], "w").close()
time.sleep(60)
"""

    def terminate() -> None:
        while not all((tmp_path / str(rank)).exists() for rank in range(2)):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    assert launch([sys.executable, "-c", program], 2, tmp_path / "logs") == TERMINATED
    thread.join()
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    rank = (
        "import os, time; from components.training.launcher import end_with_launcher; end_with_launcher(); "
        f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(60)"
    )
    program = (
        "import sys; from pathlib import Path; from components.training.launcher import launch; "
        f"launch([sys.executable, '-c', {rank!r}], 2, Path({str(tmp_path / 'logs')!r}))"
    )
    files = [tmp_path / "0", tmp_path / "1"]
    with subprocess.Popen([sys.executable, "-c", program], cwd=PROJECT) as process:
        wait_for(lambda: all(file.is_file() and file.read_text() for file in files), 60)
        process.kill()
    wait_for(lambda: not any(psutil.pid_exists(int(file.read_text())) for file in files), 10)


def test_a_rank_that_dies_ends_the_others_and_is_named(tmp_path: Path) -> None:
    program = f"""
import os, signal, time
from pathlib import Path
Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(str(os.getpid()))
while not all(Path({str(tmp_path)!r}, str(rank)).exists() for rank in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL) if os.environ["RANK"] == "1" else time.sleep(600)
"""
    started = time.monotonic()
    with pytest.raises(StageFailed, match=r"rank 1 of 3 died by signal SIGKILL .*1/stderr\.log"):
        launch([sys.executable, "-c", program], 3, tmp_path / "logs")
    assert time.monotonic() - started < 60
    for rank in range(3):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def test_ranks_that_end_well_or_on_request_are_no_failure(tmp_path: Path) -> None:
    before = dict(os.environ)
    assert launch([sys.executable, "-c", "raise SystemExit(143)"], 2, tmp_path) == TERMINATED
    slow = "import os, time; time.sleep(60 * int(os.environ['RANK'])); raise SystemExit(143)"
    assert launch([sys.executable, "-c", slow], 2, tmp_path) == TERMINATED
    program = (
        "import os; assert os.environ['MASTER_PORT'] and os.environ['LOCAL_RANK'] == os.environ['RANK']; "
        f"assert os.environ[{LAUNCHED!r}] == '2'"
    )
    assert launch([sys.executable, "-c", program], 2, tmp_path) == 0
    assert dict(os.environ) == before
