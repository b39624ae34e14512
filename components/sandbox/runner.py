"""A runner once it is isolated: it plays the roles that messages name, and reports what they raise.

This file runs inside the sandbox only; zygote.py imports it, and so torch, before it forks the first runner.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import tempfile
import traceback
from typing import Any

import op_blocker
import runner_roles
import runner_support
import torch

MAX_TRACEBACK = 6000
"""Characters of a traceback that are sent to the judge."""
_cache_folder = ""
"""Where runners outside of a sandbox keep what torch.compile made of each task."""


def main(
    receive: runner_roles.Receive,
    connection: socket.socket,
    message: dict[str, Any],
    descriptors: list[int],
    isolated: bool,
) -> None:
    """Play roles until the judge closes the connection; never returns. `receive` reads further messages."""
    code = 1
    try:
        torch.set_num_threads(1)
        if message.get("cache") and not isolated:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{_cache_folder}/tasks/{message['cache']}"
        runner_roles.serve(connection, message, descriptors, receive)
        code = 0
    except MemoryError:
        connection.send(b"Mout of memory")
    except (SystemExit, KeyboardInterrupt) as error:
        connection.send(b"Eexit " + repr(error).encode()[:200])
    except BaseException as error:  # whatever untrusted code raises becomes a message
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        text = "".join(traceback.format_exception(error, limit=-6))[-MAX_TRACEBACK:]
        try:
            connection.send((b"M" if out_of_memory else b"E") + text.encode(errors="replace"))
        except OSError:
            code = 2
    os._exit(code)


def warm_up(kind: str, device: str, cache_folder: str = "", warm_folder: str = "") -> None:
    """Do once, before runners are forked, what each of them would do by itself."""
    global _cache_folder
    _cache_folder = cache_folder
    torch.set_num_threads(1)
    for key in ("CPU", "CUDA"):
        op_blocker.compute_operators(key)
    linear = runner_support.eval_mode(torch.nn.Linear(1, 1), "cpu")
    linear.load_state_dict(torch.nn.Linear(1, 1).state_dict())
    if kind == "compile" and device == "cpu":
        warm_up_inductor(warm_folder)
    elif kind == "compile":
        import_inductor()


def warm_up_inductor(folder: str) -> None:
    """Compile one function, so that later compilations find Inductor's checks and headers done.

    Most of a first compilation's time is precompiling headers (kept on disk in `folder`) and probing the
    instruction set (kept in memory, inherited by fork).
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/kernels"
    tempfile.tempdir = folder  # where Inductor keeps precompiled headers, whatever its cache folder is
    torch.compile(lambda x: torch.sigmoid(x).sum(-1))(torch.ones(64, 64))
    torch._dynamo.reset()
    tempfile.tempdir = None


LATE_IMPORTS = (
    "torch._dynamo.backends.inductor",
    "torch._export.passes.collect_tracepoints_pass",
    "torch._inductor.choices",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.codegen.halide",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.codegen.pallas",
    "torch._inductor.codegen.wrapper_fxir",
    "torch._inductor.fx_passes.freezing_patterns",
    "torch._inductor.fx_passes.mkldnn_fusion",
    "torch._inductor.fx_passes.quantization",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "sympy.tensor.tensor",
    "triton.backends.nvidia.compiler",
    "triton.compiler.code_generator",
)
"""Modules that torch 2.11 imports only in its first compilation for a GPU.

Names that another version lacks are skipped.
"""


def import_inductor() -> None:
    """Import what compiling for a GPU needs, without initialising CUDA, which must not precede a fork.

    One of the modules (`_inductor.runtime.benchmarking`) asks at import whether there is a GPU, which
    initialises CUDA.
    """
    is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        for name in ("torch._inductor.compile_fx", *LATE_IMPORTS):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    finally:
        torch.cuda.is_available = is_available
