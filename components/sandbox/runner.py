"""The life of a runner once it is isolated: it plays the role that the judge's header names, and what it raises becomes a message.

This file runs inside the sandbox only; zygote.py imports it, and so torch, before it forks the first runner.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import tempfile
import traceback

import op_blocker
import runner_roles
import runner_support
import torch

CACHE_FOLDER = ""
"""Where a zygote outside of a sandbox keeps what torch.compile made of each task."""


def play(
    receive: runner_roles.Receive,
    connection: socket.socket,
    header: dict,
    descriptors: list[int],
    isolated: bool,
) -> None:
    """Play roles until the judge closes the connection, whose further headers `receive` reads; never returns."""
    code = 1
    try:
        torch.set_num_threads(1)
        if header.get("cache") and not isolated:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{CACHE_FOLDER}/tasks/{header['cache']}"
        runner_roles.serve(connection, header, descriptors, receive)
        code = 0
    except MemoryError:
        connection.send(b"Mout of memory")
    except (SystemExit, KeyboardInterrupt) as error:
        connection.send(b"Eexit " + repr(error).encode()[:200])
    except BaseException as error:  # the boundary: whatever untrusted code raises becomes a message
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        text = "".join(traceback.format_exception(error, limit=-6))[-6000:]
        try:
            connection.send((b"M" if out_of_memory else b"E") + text.encode(errors="replace"))
        except OSError:
            code = 2
    os._exit(code)


def warm_up(kind: str, device: str, cache_folder: str = "", warm_folder: str = "") -> None:
    """What every runner of this zygote would otherwise do for itself, done once before they are forked."""
    global CACHE_FOLDER
    CACHE_FOLDER = cache_folder
    torch.set_num_threads(1)
    for key in ("CPU", "CUDA"):
        op_blocker.compute_operators(key)
    runner_support.eval_mode(torch.nn.Linear(1, 1), "cpu").load_state_dict(torch.nn.Linear(1, 1).state_dict())
    if kind == "compile" and device == "cpu":
        warm_up_inductor(warm_folder)
    elif kind == "compile":
        import_inductor()


def warm_up_inductor(folder: str) -> None:
    """Compile one function of ours, so that every later torch.compile finds Inductor's checks and headers done.

    The first compilation of a process took 12 s, later ones about 1 s: nearly all of it is precompiling headers (kept on
    disk in `folder`) and probing the instruction set (kept in memory, inherited by fork).
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/kernels"
    tempfile.tempdir = folder  # where Inductor keeps precompiled headers, whatever its cache folder is
    torch.compile(lambda x: torch.sigmoid(x).sum(-1))(torch.ones(64, 64))
    torch._dynamo.reset()
    tempfile.tempdir = None


LATE = (
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
"""What the first compilation of a process imports besides, as seen with torch 2.11 on a GPU; a name that another version lacks is passed over."""


def import_inductor() -> None:
    """What compiling for a GPU imports, seconds of CPU time of every runner otherwise; CUDA must not be initialised before a fork.

    Of all of it one module asks whether there is a GPU when it is imported (`_inductor.runtime.benchmarking`), which initialises CUDA.
    """
    asked, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        for name in ("torch._inductor.compile_fx", *LATE):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    finally:
        torch.cuda.is_available = asked
