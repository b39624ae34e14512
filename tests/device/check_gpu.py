"""Checks that need a GPU, in at most ten minutes, as a table: name, user, end, seconds.

    python tests/device/check_gpu.py [--seconds 580] [--out FOLDER]

Run it as root, and a part of the corpus is judged a second time as an ordinary account without a name, on a
copy of the checkout that this account may read. Needs torch and this project, no pytest. Each check's output
is FOLDER/NAME.log; ends with 1 unless all are OK.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
ORDINARY = 10001
PREFLIGHT = """
from components.core.config import resolve
from components.sandbox.preflight import check_isolation
check_isolation(resolve("smoke").params.sandbox, "cuda")
"""
# Candidates that are judged as an ordinary account too. `cublas_product` is left out: torch.compile's
# max-autotune takes a minute to compile and time kernels for its product, and each account has its own cache.
FEW = (
    "float4",
    "plain",
    "graph_copied_inputs",
    "illegal_access",
    "device_memory_bomb",
    "host_memory_bomb",
    "late_thread",
    "pointer_cache",
)


# Bytes of a large task's input in GB: more would take longer, and less would not share buffers in 96 GB.
LARGE_GIGABYTES = "3.2"
# Word in a check's arguments for the seconds in which it may begin parts that take up to `PART_SECONDS`.
SECONDS_LEFT, PART_SECONDS = "{seconds}", 45


@dataclass(frozen=True)
class Check:
    """One command, run in the checkout; `user` is the uid that it runs as, or None for this process's own."""

    name: str
    arguments: tuple[str, ...]
    user: int | None = None


def checks(out: Path) -> list[Check]:
    """The most telling first: where time runs out, the last ones are cut off."""
    corpus = ("tests/device/judge_corpus.py", "--repeats", "5")
    large = (
        "tests/device/large_tasks.py",
        *("--gigabytes", LARGE_GIGABYTES),
        *("--seconds", SECONDS_LEFT),
    )
    own = [
        Check("isolation", ("-c", PREFLIGHT)),
        Check("exact-answers", ("tests/device/exact_answers.py",)),
        Check("corpus", (*corpus, "--table", str(out / "corpus.md"))),
        Check("large-tasks", large),
    ]
    if os.geteuid() != 0:
        return own
    return [
        own[0],
        Check("isolation-ordinary", ("-c", PREFLIGHT), ORDINARY),
        Check("corpus-few-ordinary", (*corpus, *FEW), ORDINARY),
        *own[1:],
    ]


def copied(folder: Path) -> Path:
    """A copy of the checkout and a home that the ordinary account may use."""
    folder.chmod(0o755)
    copy = folder / "checkout"
    shutil.copytree(
        PROJECT,
        copy,
        ignore=shutil.ignore_patterns(".git", ".venv", ".cuda-agent", "__pycache__", ".whl"),
        symlinks=True,
    )
    (folder / "home").mkdir()
    for path in (folder / "home", copy, *copy.rglob("*")):
        os.chown(path, ORDINARY, ORDINARY, follow_symlinks=False)
    return copy


def run(check: Check, copy: Path, out: Path, seconds: float) -> tuple[str, float]:
    """How `check` ended, and after how many seconds."""
    began = time.monotonic()
    left = f"{max(0.0, seconds - PART_SECONDS):.0f}"
    ordinary = check.user is not None
    environment = (
        os.environ | {"PYTHONUNBUFFERED": "1"} | ({"HOME": str(copy.parent / "home")} if ordinary else {})
    )
    with (out / f"{check.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *(word.replace(SECONDS_LEFT, left) for word in check.arguments)],
            cwd=copy if ordinary else PROJECT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            user=check.user,
            group=check.user,
            extra_groups=[] if ordinary else None,
            start_new_session=True,
        )
        try:
            code = process.wait(max(1.0, seconds))
            said = "OK" if code == 0 else f"FAIL (exit code {code})"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            said = "cut off"
    return said, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=580, help="for all checks together")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(tempfile.gettempdir()) / "check-gpu",
        help="folder for logs and tables",
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    results = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = copied(Path(folder)) if os.geteuid() == 0 else PROJECT
        print(f"{'check':24} {'as uid':8} {'seconds':>8}  result", flush=True)
        for check in checks(options.out):
            said, seconds = run(check, copy, options.out, end - time.monotonic())
            results.append(said)
            print(
                f"{check.name:24} {check.user if check.user is not None else os.geteuid():<8} {seconds:8.1f} "
                f" {said}",
                flush=True,
            )
            for line in (options.out / f"{check.name}.log").read_text(errors="replace").splitlines()[-3:]:
                print(f"    {line[:200]}", flush=True)
    return 0 if all(said == "OK" for said in results) else 1


if __name__ == "__main__":
    sys.exit(main())
