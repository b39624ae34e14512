"""A small task for tests of the judge, and the candidates of tests/honest and tests/exploits as the judge takes them.

A candidate's folder holds what differs from the plain answer: without model_new.py it has the starter below, without
kernels/ the fast honest kernel of tests/honest/simd, without model.py it answers the task below. `#include "raw.h"` or `"protocol.h"`
gives exploits system calls without libc, `#include "answer.cuh"` the honest answer on a GPU (groups honest_cuda, exploits_cuda).
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import psutil

from components.core.task import KernelTask

HERE = Path(__file__).resolve().parent
CODE = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        return F.leaky_relu(torch.sigmoid(x) * self.scale - 0.3, 0.1)

def get_inputs():
    return [torch.randn(256, 1024)]

def get_init_inputs():
    return []
"""
TASK = KernelTask(code=CODE)
CUDA_TASK = KernelTask(code=CODE.replace("torch.randn(256, 1024)", "torch.randn(2048, 1024)"))
MODEL_NEW = """
import torch
import torch.nn as nn
import cuda_extension

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        out = torch.empty_like(x)
        cuda_extension.forward(x, self.scale, out)
        return out
"""


def names(group: str) -> list[str]:
    return sorted(path.name for path in (HERE / group).iterdir() if path.is_dir())


def files(group: str, name: str) -> dict[str, str]:
    """Workspace path -> text."""
    folder = HERE / group / name
    plain = HERE / ("honest_cuda/plain" if group.endswith("cuda") else "honest/simd")
    kernels = folder / "kernels" if (folder / "kernels").is_dir() else plain / "kernels"
    found = {"model_new.py": MODEL_NEW} | {
        f"kernels/{path.name}": path.read_text() for path in sorted(kernels.iterdir())
    }
    if (folder / "model_new.py").exists():
        found["model_new.py"] = (folder / "model_new.py").read_text()
    for header in (
        HERE / "exploits" / "protocol.h",
        HERE / "exploits" / "raw.h",
        HERE / "exploits_cuda" / "answer.cuh",
    ):
        if any(f'#include "{header.name}"' in text for text in found.values()):
            found[f"kernels/{header.name}"] = header.read_text()
    return found


def task(group: str, name: str) -> KernelTask:
    """The task that a candidate answers: its folder's model.py, or the one above."""
    own = HERE / group / name / "model.py"
    if own.exists():
        return KernelTask(code=own.read_text())
    return CUDA_TASK if group.endswith("cuda") else TASK


def expected(name: str, group: str = "exploits") -> dict[str, Any]:
    return json.loads((HERE / group / name / "expected.json").read_text())


def depth(pid: int | str) -> int:
    """In how many nested PID namespaces, counted from the machine's /proc, the process has a number."""
    line = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid:")
    )
    return len(line.split()) - 1


def census() -> set[tuple[int, float]]:
    """Every process that is a runner of ours or was made by one, by PID and start: two PID namespaces below this process.

    None escapes its descent or its namespace, and an ordinary user's have no uid of their own to be known by.
    """
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            if depth(process.pid) >= depth("self") + 2:
                found.add((process.pid, process.create_time()))
    return found
