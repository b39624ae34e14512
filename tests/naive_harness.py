"""What the exploits were written for: a harness in the candidate's own process, after KernelBench's loop.

    python naive_harness.py FOLDER...

Each FOLDER holds a task's model.py, a candidate's model_new.py and its built cuda_extension. One line of JSON a folder:
whether the output was accepted (once, allclose 1e-2) and the speed-up over ten calls on the same inputs. It is wrong on
purpose, and shows that an exploit that the judge refuses is a real one.
"""

import importlib
import json
import os
import sys
import time

import torch


def seconds(call, inputs):
    for _ in range(6):
        call(*inputs)
    blocks = []
    for _ in range(5):  # the quickest block: others use these cores too
        start = time.perf_counter()
        for _ in range(10):
            call(*inputs)
        blocks.append(time.perf_counter() - start)
    return min(blocks)


def evaluate(folder):
    sys.path.insert(0, folder)
    task = importlib.import_module("model")
    torch.manual_seed(42)
    inputs = task.get_inputs()
    with torch.no_grad():
        reference = task.Model(*task.get_init_inputs())
        expected = reference(*inputs)
        eager = seconds(reference, inputs)
        candidate = importlib.import_module("model_new").ModelNew(*task.get_init_inputs())
        accepted = torch.allclose(candidate(*inputs), expected, atol=1e-2, rtol=1e-2)
        said = {
            "name": os.path.basename(folder),
            "accepted": bool(accepted),
            "speedup": eager / seconds(candidate, inputs),
        }
        os.write(
            1, (json.dumps(said) + "\n").encode()
        )  # before anything is freed that a late thread may still write to


if __name__ == "__main__":
    torch.set_num_threads(1)
    for path in sys.argv[1:]:
        if os.fork() == 0:  # a fresh process each, as KernelBench's evaluation script uses
            evaluate(path)
            os._exit(0)
        os.wait()
