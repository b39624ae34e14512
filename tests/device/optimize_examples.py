"""A kernel user's way on a device: the template's commands, then `cuda-agent optimize`.

    python tests/device/optimize_examples.py [--device cuda] [--out DIR] [--set KEY=VALUE] [NAME...]

The policy is scripted: a local server that speaks OpenAI's protocol and answers with the rule-written
kernels of the cold start, the fastest style first. So the whole way from a module to a drop-in kernel is
real but the writing. Needs torch and this project, no pytest.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

from agent_fixtures import completion, server
from schedules import FUSED, SEPARATE, VECTORISED

from components.bootstrap.canonicalize import canonicalize
from components.bootstrap.demonstrations import DONE, MEASURE, SUFFIX
from components.bootstrap.kernel_writer import write_kernel
from components.bootstrap.operator_chain import read_chain
from components.core.config import PROJECT
from components.core.records import Device

EXAMPLES = PROJECT / "docs" / "examples"
SECONDS = 300


def script(code: str, device: Device) -> Callable[[int, dict[str, Any]], tuple[int, bytes, dict[str, str]]]:
    """Return the server's answers on one module: three kernels, fastest first, each measured."""
    chain = read_chain(canonicalize(code) or "")
    schedules = (VECTORISED[device], FUSED[device], SEPARATE[device])
    kernels = [write_kernel(chain, schedule) for schedule in schedules] if chain else []

    def answer(number: int, body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        if turn >= len(kernels):
            return 200, completion(DONE), {}
        write = (
            "Write",
            json.dumps({"file_path": f"kernels/forward.{SUFFIX[device]}", "content": kernels[turn]}),
        )
        return (
            200,
            completion("", [write, ("Bash", json.dumps({"command": MEASURE}))], finish="tool_calls"),
            {},
        )

    return answer


def cuda_agent(*words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "components.cli", *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=PROJECT,
    )
    return done.returncode, done.stdout, done.stderr


def plain_commands() -> bool:
    """Build, verify and profile a copy of the template with its three commands."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(PROJECT / "agent_workdir", Path(folder) / "workspace")
        path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
        environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": path}
        good = True
        for command in (
            ["bash", "utils/compile.sh"],
            [sys.executable, "-m", "utils.verification"],
            [sys.executable, "-m", "utils.profiling"],
        ):
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS
            )
            print(f"$ {' '.join(command[-2:])}\n{(done.stdout + done.stderr).strip()[-400:]}", flush=True)
            good = good and done.returncode == 0
    return good


def optimized(name: str, device: Device, out: Path, sets: list[str]) -> bool:
    """One example made faster: its figures, or what went wrong."""
    module = EXAMPLES / f"{name}.py"
    with server(script(module.read_text(), device)) as address:
        words = [
            "optimize",
            str(module),
            "--policy",
            address,
            "--device",
            device,
            "--attempts",
            "1",
            "--turns",
            "4",
            "--out",
            str(out / name),
            "--json",
        ]
        status, said, why = cuda_agent(
            *words, "--home", str(out / "home"), *(word for value in sets for word in ("--set", value))
        )
    if status != 0:
        print(
            f"FAIL  {name:18} exit code {status}:"
            f" {why.strip().splitlines()[-1][:200] if why.strip() else ''}",
            flush=True,
        )
        return False
    record = json.loads(said)
    ratios = [
        f"{ratio['estimate']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}] of {arm}"
        for arm, ratio in record["speedup"].items()
        if ratio
    ]
    print(f"OK    {name:18} {'gain' if record['found'] else 'no gain'}: {', '.join(ratios)}", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("names", nargs="*", metavar="NAME")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = (chosen.out or Path(folder)).resolve()
        good = [plain_commands()]
        names = chosen.names or sorted(path.stem for path in EXAMPLES.glob("*.py"))
        good += [optimized(name, chosen.device, out, chosen.sets) for name in names]
    print(f"{sum(good)} of {len(good)}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
