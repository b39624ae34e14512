"""All checks that need a GPU, as a table: name, user, budget, seconds, result. Each part takes ten minutes.

    python tests/device/check_gpu.py [--part 1|2|3|4|5] [--seconds 580] [--out FOLDER] [--suite FOLDER]
        [--list] [NAME...]

Part 1 has what the judge's verdicts depend on, part 2 training and sampling, part 3 the whole corpus and
KernelBench's baselines, part 4 the speed of updates, in three minutes, and part 5 pushes of weights from one
GPU to another. Each check is a script of tests/device or tests/bench and has a budget of seconds; what a
check leaves of its budget goes to those after it, and the most telling come first. With NAMEs only these
checks run, of whatever part. Checks that need a package that is missing, or `--suite` (a checkout of
KernelBench), are listed as not run. As root, two of them run a second time as an ordinary account without a
name, on a copy of the checkout that this account may read. Needs torch and this project, no pytest.

Each check's output is FOLDER/NAME.log, and its last lines are printed. Ends with 0 if no check failed and all
of those that could run were finished, with 1 otherwise, and with 2 where there is no GPU.
"""

import argparse
import importlib.util
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
# Exploits by which one call of a round could answer for others, or answer after the clock has stopped.
OF_ROUNDS = ("mapped_twice", "imported_buffers", "batch", "batch_weights", "early_thread", "output_slot")
# Bytes of a large task's input in GB: more would take longer, and less would not share buffers in 96 GB.
LARGE_GIGABYTES = "3.2"
# Words of a check's arguments that stand for its seconds, and for its seconds less `PART_SECONDS`. The latter
# is for checks that begin no other part after that time, where a part may take `PART_SECONDS`.
SECONDS, SECONDS_TO_BEGIN = "{seconds}", "{seconds to begin}"
PART_SECONDS = 45
SHOWN_LINES = 4


@dataclass(frozen=True)
class Check:
    """One command, run in the checkout.

    `budget` is its share of the seconds, `user` the uid that it runs as, or None for this process's own,
    `needs` the packages that it imports beside those that the judge needs, and `program` one on PATH that it
    starts.
    """

    name: str
    part: int
    budget: float
    arguments: tuple[str, ...]
    user: int | None = None
    needs: tuple[str, ...] = ()
    program: str = ""


def checks(out: Path, suite: Path | None) -> list[Check]:
    """Return all checks for this user in the order in which they run."""
    corpus = ("tests/device/judge_corpus.py", "--repeats", "5")
    adapter = ("--model", "Qwen3-0.6B", "--profile", "hf-adapter", "--device", "cuda")
    found = [
        Check("isolation", 1, 5, ("-c", PREFLIGHT)),
        Check("isolation-ordinary", 1, 5, ("-c", PREFLIGHT), ORDINARY),
        Check("exact-answers", 1, 100, ("tests/device/exact_answers.py",)),
        Check(
            "counters", 1, 60, (*corpus, "--set", "sandbox.counters=true", "float4", "plain"), program="ncu"
        ),
        Check("exploits-of-rounds", 1, 130, (*corpus, *OF_ROUNDS)),
        Check(
            "large-tasks",
            1,
            170,
            (
                "tests/device/large_tasks.py",
                *("--gigabytes", LARGE_GIGABYTES),
                *("--seconds", SECONDS_TO_BEGIN),
            ),
        ),
        Check("corpus-ordinary", 1, 75, (*corpus, *FEW), ORDINARY),
        Check("first-call", 1, 100, ("tests/device/first_call.py", "--repeats", "3", "--skip-turns")),
        Check("planned-memory", 2, 120, ("tests/device/planned_memory.py",), needs=("deepspeed", "peft")),
        Check(
            "long-context",
            2,
            200,
            ("tests/device/long_context.py", "--seconds", SECONDS, "--out", str(out / "long-context")),
            needs=("deepspeed", "peft"),
        ),
        Check("packed-attention", 4, 60, ("tests/device/packed_attention.py",)),
        Check(
            "throughput",
            4,
            100,
            ("tests/bench/bench_throughput.py", *("--seconds", SECONDS)),
            needs=("deepspeed",),
        ),
        Check("update", 2, 120, ("tests/bench/bench_update.py", *adapter), needs=("deepspeed", "peft")),
        Check("push-weights", 5, 560, ("tests/device/push_weights.py",), program="vllm"),
        Check("sampling", 2, 140, ("tests/device/vllm_backends.py",), program="vllm"),
        Check("corpus", 3, 300, (*corpus, "--table", str(out / "corpus.md"))),
    ]
    if suite is not None:
        sizes = ("tests/device/suite_memory.py", str(suite), str(out / "suite-memory.json"))
        baselines = ("tests/bench/bench_baselines.py", str(suite), str(out / "baselines.json"))
        options = ("--profile", "h200", "--levels", "1,2,3", "--seconds", SECONDS_TO_BEGIN)
        found.append(Check("suite-memory", 1, 70, sizes))
        found.append(Check("baselines", 3, 280, (*baselines, *options)))
    return [check for check in found if check.user is None or os.geteuid() == 0]


def missing(check: Check) -> list[str]:
    """Return the packages and the program that `check` needs and this environment lacks."""
    packages = [name for name in check.needs if importlib.util.find_spec(name) is None]
    return packages + [check.program] * (check.program != "" and shutil.which(check.program) is None)


def copied(folder: Path) -> Path:
    """Make a copy of the checkout and a home that the ordinary account may use, and return the copy."""
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


def run(check: Check, copy: Path, out: Path, seconds: float) -> str:
    """Run `check` for at most `seconds`, and return how it ended."""
    words = {SECONDS: f"{seconds:.0f}", SECONDS_TO_BEGIN: f"{max(0.0, seconds - PART_SECONDS):.0f}"}
    ordinary = check.user is not None
    folder = copy if ordinary else PROJECT
    modules = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": modules}
    with (out / f"{check.name}.log").open("wb") as log:
        try:
            process = subprocess.Popen(
                [sys.executable, *(words.get(word, word) for word in check.arguments)],
                cwd=folder,
                env=environment | ({"HOME": str(copy.parent / "home")} if ordinary else {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                user=check.user,
                group=check.user,
                extra_groups=[] if ordinary else None,
                start_new_session=True,
            )
        except PermissionError:
            return f"FAIL (uid {check.user} may not execute {sys.executable})"
        try:
            code = process.wait(seconds)
            return "OK" if code == 0 else f"FAIL (exit code {code})"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "cut off"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, choices=(1, 2, 3, 4, 5), default=1, help="if no NAME is given")
    parser.add_argument("--seconds", type=float, default=580, help="for all checks together")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(tempfile.gettempdir()) / "check-gpu",
        help="folder for logs and tables",
    )
    parser.add_argument("--suite", type=Path, help="checkout of KernelBench, whose baselines are measured")
    parser.add_argument("--list", action="store_true", help="print names, budgets and commands only")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    found = checks(options.out, options.suite)
    if unknown := set(options.names) - {check.name for check in found}:
        parser.error(f"no check {', '.join(sorted(unknown))}: --list names those for this user")
    chosen = [
        check
        for check in found
        if (check.name in options.names if options.names else check.part == options.part)
    ]
    if options.list:
        for check in chosen:
            print(f"{check.name:20} {check.budget:4.0f} s  {' '.join(' '.join(check.arguments).split())}")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("check_gpu: torch finds no GPU here; run it where nvidia-smi lists one.", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    end, results = time.monotonic() + options.seconds, []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        needs_copy = any(check.user is not None for check in chosen)
        copy = copied(Path(folder)) if needs_copy else PROJECT
        print(f"{'check':20} {'as uid':>6} {'budget':>7} {'seconds':>8}  result", flush=True)
        waiting = [check for check in chosen if not missing(check)]
        for check in chosen:
            began = time.monotonic()
            if check in waiting:
                waiting.remove(check)
                seconds = end - began - sum(other.budget for other in waiting)
                said = run(check, copy, options.out, max(1.0, seconds)) if end > began else "no time left"
                results.append(said)
                log = options.out / f"{check.name}.log"
                last = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:] if log.is_file() else []
            else:
                said, last = f"not run: needs {', '.join(missing(check))}", []
            uid = os.geteuid() if check.user is None else check.user
            took = time.monotonic() - began
            print(f"{check.name:20} {uid:6} {check.budget:7.0f} {took:8.1f}  {said}", flush=True)
            for line in last:
                print(f"    {line[:200]}", flush=True)
    return 0 if all(said == "OK" for said in results) else 1


if __name__ == "__main__":
    sys.exit(main())
