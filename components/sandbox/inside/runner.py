"""The main function of an isolated runner, which takes roles and reports their errors to the judge.

This file runs only inside the sandbox. zygote.py imports it before the first fork, so that all runners share
one import of torch.
"""

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

# Maximum number of characters of a traceback that are sent to the judge.
MAX_TRACEBACK = 6000


def main(
    receive: runner_roles.Receive,
    connection: socket.socket,
    message: dict[str, Any],
    descriptors: list[int],
    isolated: bool,
) -> None:
    """Take roles until the judge closes the connection, then end the process.

    `message` is the first header and `descriptors` came with it; `receive` reads further messages. `isolated`
    is not used. An error is sent to the judge as a message.
    """
    code = 1
    try:
        torch.set_num_threads(1)
        runner_roles.serve(connection, message, descriptors, receive)
        code = 0
    except MemoryError:
        connection.send(b"Mout of memory")
    except (SystemExit, KeyboardInterrupt) as error:
        connection.send(b"Eexit " + repr(error).encode()[:200])
    except BaseException as error:  # untrusted code may raise any exception
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        text = "".join(traceback.format_exception(error, limit=-6))[-MAX_TRACEBACK:]
        try:
            connection.send((b"M" if out_of_memory else b"E") + text.encode(errors="replace"))
        except OSError:
            code = 2
    os._exit(code)


def warm_up(kind: str, device: str, warm_folder: str = "") -> None:
    """Do the slow first-use work of torch once, before runners are forked, so that no runner repeats it.

    With `kind` "compile", torch.compile is prepared too; with "plain" it is not. On cpu this writes the
    precompiled headers of Inductor, torch.compile's compiler, to `warm_folder`; otherwise it is not used.
    """
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
    """Compile one function, so that later compilations with Inductor on cpu are faster.

    Most of the time of a first compilation is spent on precompiling headers, which are stored in `folder`,
    and on finding out the processor's instruction sets, which stay in memory and are inherited by fork.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/kernels"
    tempfile.tempdir = folder  # Inductor stores precompiled headers here and not in its cache folder
    torch.compile(lambda x: torch.sigmoid(x).sum(-1))(torch.ones(64, 64))
    torch._dynamo.reset()
    tempfile.tempdir = None


# Modules that torch 2.11 imports only during its first compilation for a GPU. A module that the installed
# version of torch does not have is skipped.
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


def import_inductor() -> None:
    """Import the modules that compiling for a GPU needs, without initialising CUDA.

    CUDA must not be initialised before a fork. One of the modules (`_inductor.runtime.benchmarking`) calls
    torch.cuda.is_available when it is imported, which would initialise CUDA, so that function is replaced
    during the imports.
    """
    is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        for name in ("torch._inductor.compile_fx", *LATE_IMPORTS):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    finally:
        torch.cuda.is_available = is_available
