"""The command `cuda-agent`: assembles the commands, and turns exceptions into one sentence and an exit code.

Flows, Prefect, MLflow and torch are imported only inside the commands that need them, so that `cuda-agent
judge` works on a node without Prefect and MLflow, and `--help` is fast. With `--json`, exactly one JSON
object is written to standard output. All other text is written to standard error.

Exit codes: 0 done, 1 failed, 2 bad input or environment, 3 isolation of untrusted code unavailable, 4 a gate
(a condition of promotion) refused a model version or the version's approval came after the deadline, 130
interrupted, 143 ended by SIGTERM.
"""

import faulthandler
import gc
import logging
import os
import signal
import sys

import typer

from components.cli.common import ExitCode
from components.cli.data import data_app
from components.cli.doctor import doctor
from components.cli.evaluation import evaluate, runs_app
from components.cli.kernels import judge, optimize
from components.cli.models import models_app
from components.cli.params import params, plan
from components.cli.run import run
from components.cli.service import mcp, serve, token_app
from components.cli.store import store_app
from components.cli.train import fleet, train
from components.cli.trajectory import trajectory_app
from components.core.errors import StageFailed, UserError
from components.core.files import environment_fault
from components.core.signals import Terminated, handle_signals

app = typer.Typer(
    name="cuda-agent",
    help="Train a policy that writes GPU kernels, rewarded by their measured speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    run,
    judge,
    serve,
    mcp,
    optimize,
    evaluate,
    train,
    fleet,
    plan,
    params,
    doctor,
):
    app.command()(command)
for name, group in (
    ("data", data_app),
    ("models", models_app),
    ("runs", runs_app),
    ("store", store_app),
    ("token", token_app),
    ("trajectory", trajectory_app),
):
    app.add_typer(group, name=name)


def _reopen_standard_streams() -> None:
    """Open /dev/null in place of standard streams that are closed when the process starts.

    Otherwise files that are opened later would get the descriptors of the standard streams.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _check_current_folder() -> None:
    """Raise UserError if the current folder was removed, because every relative path would fail."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the current folder was removed; change to another one (cd).") from error


def show_logs() -> None:
    """Print what this project's modules log, from the level INFO on, as plain lines on standard error."""
    # This handler finds standard error anew for each line, which a live table of rich replaces meanwhile.
    log, handler = logging.getLogger("components"), logging.lastResort
    assert handler is not None
    log.setLevel(logging.INFO)
    handler.setLevel(logging.INFO)
    log.addHandler(handler)


def main() -> None:
    """Run the command that the arguments of this process name.

    Errors that a user can fix are printed as one sentence on standard error, with an exit code but without a
    traceback.
    """
    _reopen_standard_streams()
    show_logs()
    handle_signals()
    faulthandler.register(signal.SIGUSR1)  # prints what each thread does, of a command that seems to hang
    # No command downloads from Hugging Face, and progress bars for loading weights are switched off.
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")
    # A configured proxy must not be used for connections to servers on this machine.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))
    try:
        _check_current_folder()
        app()
    except UserError as error:
        print(f"cuda-agent: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except StageFailed as error:
        # Not joined: the lines of a failed rank's log may follow the sentence (training/launcher.py).
        print(f"cuda-agent: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Terminated:
        print("cuda-agent: ended by SIGTERM; the same command continues where it stopped.", file=sys.stderr)
        raise
    except Exception as error:
        sentence = environment_fault(error)
        if not sentence:
            raise
        print(f"cuda-agent: {sentence}", file=sys.stderr)
        sys.exit(ExitCode.BAD_INPUT)
    finally:
        gc.freeze()  # a faster exit: the last garbage collection skips all objects
