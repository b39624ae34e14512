"""Call a candidate a few times in a process that Nsight Compute observes, and mark the last call for it.

    python counted_call.py PACKAGES MODULES FOLDER

PACKAGES are folders of Python packages, separated by colons, and MODULES is the folder of the compiled
result_channel.cpp. FOLDER has the file header.json, a RoleHeader (runner_protocol.py) with the sources of the
task and of the candidate, and the file library with the candidate's library, which an archive of kernels of
Triton may follow. A candidate is an implementation of a task's module that is judged. Nsight Compute counts
only between the calls of `torch.cuda.profiler`. This file runs only inside the sandbox.
"""

import io
import json
import os
import sys
from pathlib import Path

# Calls before the one that is counted, which load kernels and make the GPU raise its clocks.
CALLS_BEFORE = 2


def main() -> None:
    packages, modules, folder = sys.argv[1:]
    sys.path += [path for path in packages.split(os.pathsep) if path]
    sys.path[:0] = [modules, str(Path(__file__).resolve().parent)]
    import loading
    import torch
    import triton_cache

    os.chdir(os.environ["TMPDIR"])
    header = json.loads(Path(folder, "header.json").read_bytes())
    content = io.BytesIO(Path(folder, "library").read_bytes())
    library, archive = content.read(header["library_bytes"]), content.read()
    if archive:
        triton_cache.warm_up_triton()
        triton_cache.load(archive)
    call = loading.call_with_own_inputs(header, library)
    is_cuda = header["device"] == "cuda"
    with torch.no_grad():
        for _ in range(CALLS_BEFORE):
            call()
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        call()
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
