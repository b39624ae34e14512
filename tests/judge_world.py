"""A small task for tests of the judge, and the candidates of tests/honest and tests/exploits as the judge takes them.

A candidate's folder holds what differs from the plain answer: without model_new.py it has the starter below, without
kernels/ the fast honest kernel of tests/honest/simd. `#include "raw.h"` gives exploits system calls without libc.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from components.task import KernelTask

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
    found = {"model_new.py": MODEL_NEW}
    kernels = folder / "kernels" if (folder / "kernels").is_dir() else HERE / "honest" / "simd" / "kernels"
    for path in [folder / "model_new.py", *sorted(kernels.iterdir())]:
        if path.is_file():
            found[path.relative_to(folder if folder in path.parents else HERE / "honest" / "simd").as_posix()] = path.read_text()
    if any('#include "raw.h"' in text for text in found.values()):
        found["kernels/raw.h"] = (HERE / "exploits" / "raw.h").read_text()
    return found


def expected(name: str) -> dict[str, Any]:
    return json.loads((HERE / "exploits" / name / "expected.json").read_text())
