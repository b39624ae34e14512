"""The process of one pipeline run of campaign.py, in a fork of this process."""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from run_fixtures import REDUCED

PR_SET_PDEATHSIG = 1


class PipelineRun:
    """One night's command, its home and the process that runs it."""

    def __init__(self, stack: Path, home: Path, seed: int, model: str, pool: str):
        self.stack, self.home, self.seed, self.pool = stack, home, seed, pool
        own = {
            "registry.model": model,
            "registry.tracking_uri": f"http://127.0.0.1:{os.environ['MLFLOW_PORT']}",
            "seed": seed,
        }
        own |= {
            "store.url": f"s3://{os.environ['BUCKET']}/{model}",
            "store.endpoint": os.environ["AWS_ENDPOINT_URL_S3"],
            "pool.judges": int(pool == "ray"),
        }
        self.sets = [f"{key}={json.dumps(value)}" for key, value in (REDUCED | own).items()]
        self.process = 0

    def start(self) -> None:
        self.process = os.fork()
        if self.process == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            with (self.stack / "campaign.log").open("ab", buffering=0) as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            chosen = [word for value in self.sets for word in ("--set", value)]
            sys.argv = ["cuda-agent", "run", "--profile", "ci", "--home", str(self.home), *chosen]
            from components.cli.main import main

            code = 1
            try:
                main()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            finally:
                os._exit(code)

    def ended(self, seconds: float) -> int | None:
        """The exit code (negative: the signal) once it has ended; None when it still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            process, status = os.waitpid(self.process, os.WNOHANG)
            if process:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)
