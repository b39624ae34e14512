"""Which tasks of a suite the rule-based kernel writer knows, and whether its kernels are right when small.

    python tests/bench/rules_coverage.py FOLDER [--seed N] [--device cuda] [--nvcc]

FOLDER has task files, for instance KernelBench/level1 of a KernelBench checkout. For each task that is known,
the sizes that the module names are made smaller, and a kernel for the cpu with a random schedule is built and
compared with torch's output in float64. Tasks that are still large then, or do not run, are counted apart.
With --device cuda the kernel is one for a GPU, which is translated to C++ and computed on the cpu.
With --nvcc, two CUDA kernels for each known task at its own sizes are compiled too. Kernels at own sizes are
judged by `cuda-agent evaluate --policy rules --suite FOLDER`.
"""

import argparse
import random
import re
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "nightly"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

from emulated_cuda import SHIM, emulated
from kernel_bench import compile_cuda, is_right

from components.bootstrap.demonstrations import draw_kernel
from components.bootstrap.tensor_operators import read_program

# A size with a name on the level of the module.
SIZE = re.compile(r"^(\w+(?: = \w+)*) *= *(\d[\d *]*?) *(?:#.*)?$", re.MULTILINE)
# Largest number of input elements that is tried, and largest values of sizes: of images, and of others.
MAX_NUMEL, SMALL_SIDE, SMALL_BATCH, SMALL = 3_000_000, 24, 4, 64


def reduced(code: str, factor: float) -> str:
    """Return the source with smaller sizes, at most `factor` times SMALL_SIDE, SMALL_BATCH and SMALL."""

    def smaller(match: re.Match[str]) -> str:
        name, value = match[1], eval(match[2])
        sides = re.search("height|width|depth|length|dim[123]", name)
        limit = SMALL_SIDE if sides else SMALL_BATCH if "batch" in name else SMALL
        return f"{name} = {min(value, int(factor * limit))}"

    return SIZE.sub(smaller, code)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--nvcc", action="store_true")
    chosen = parser.parse_args()
    rng, files = random.Random(chosen.seed), sorted(chosen.folder.glob("*.py"))
    torch.set_num_threads(1)
    known, right, wrong, left_out = [], [], [], []
    for file in files:
        if read_program(file.read_text()) is None:
            continue
        known.append(file)
        # Computing a kernel for a GPU on the cpu is slow.
        code, space = reduced(file.read_text(), 0.5 if chosen.device == "cuda" else 1), {}
        try:
            exec(code, space)
            numel = sum(x.numel() for x in space["get_inputs"]())
            kernel, head = draw_kernel(code, chosen.device, rng), ""
            if chosen.device == "cuda":
                kernel, head = emulated(kernel), SHIM
            if numel > MAX_NUMEL:
                raise ValueError(f"{numel} numbers")
            (right if is_right(code, kernel, head) else wrong).append(file)
        except (RuntimeError, ValueError) as error:
            left_out.append(file)
            print(f"left out: {file.name}, {str(error).splitlines()[0]}")
    if chosen.nvcc:
        kernels = [draw_kernel(file.read_text(), "cuda", rng) for file in (*known, *known)]
        with tempfile.TemporaryDirectory() as folder:
            compile_cuda(kernels, Path(folder))
        print(f"{len(kernels)} CUDA kernels compile")
    for file in wrong:
        print(f"wrong: {file.name}")
    results = f"{len(right)} right, {len(wrong)} wrong, {len(left_out)} left out"
    print(f"{len(known)} of {len(files)} known: {results}")


if __name__ == "__main__":
    main()
