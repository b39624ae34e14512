"""Processes that have nothing to import: forked from a clean one that has imported what takes long, once for each test process.

A fork of the test process itself would take other tests' threads, locks and database connections along. Prefect is not
imported before: it reads its settings then.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["deepspeed", "mlflow", "components.judge.judge", "components.training.run_stage"]
)


@dataclass
class Command:
    """`cuda-agent` with arguments, at work: its process and where its outputs go."""

    process: BaseProcess
    output: Path
    errors: Path

    def ended(self, seconds: float) -> bool:
        self.process.join(seconds)
        return self.process.exitcode is not None

    def result(self) -> tuple[int, str, str]:
        """Exit code (negative: the signal), standard output, standard error; once it has ended."""
        assert self.process.exitcode is not None
        return self.process.exitcode, self.output.read_text(), self.errors.read_text()


@contextlib.contextmanager
def command(arguments: Sequence[str], environment: dict[str, str]) -> Iterator[Command]:
    """The real command with an environment of its own; killed at the end if it still runs."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = FORKS.Process(target=_main, args=(list(arguments), environment, output, errors))
        process.start()
        try:
            yield Command(process, output, errors)
        finally:
            process.kill()
            process.join()


def _main(arguments: list[str], environment: dict[str, str], output: Path, errors: Path) -> None:
    for number, place in ((1, output), (2, errors)):
        opened = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["cuda-agent", *arguments]
    from components.cli.main import main

    code: object = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
