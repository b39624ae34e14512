"""The candidates for a GPU compile and pass the screening, on a machine that needs no GPU.

Of candidates with kernels of Triton, which are compiled when they are judged, the screening alone is checked.
"""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import judge_fixtures as corpus
import pybind11
import pytest

from components.core.config import resolve
from components.judge.candidate import screen_candidate
from components.judge.screen import screen_files, screen_python
from components.judge.symbol_screen import screen_symbols
from components.judge.verdict import Rejected
from components.sandbox import isolation
from components.sandbox.compilers import CUDA_FLAGS, library_flags

WORKDIR = corpus.HERE.parent / "agent_workdir"
FLAGS = (*CUDA_FLAGS, "-arch=sm_90")
INCLUDES = (f"-I{WORKDIR}", f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}")
CANDIDATES = [(group, name) for group in ("honest_cuda", "exploits_cuda") for name in corpus.names(group)]
TRITON = [candidate for candidate in CANDIDATES if list(corpus.files(*candidate)) == ["model_new.py"]]
# All honest candidates, and every second exploit.
BUILT = [one for one in CANDIDATES if one not in TRITON and one[0] == "honest_cuda"]
BUILT += [one for one in CANDIDATES if one not in TRITON and one[0] != "honest_cuda"][::2]


def symbols(library: Path) -> tuple[str, ...]:
    command = ["nm", "--undefined-only", "--format=posix", str(library)]
    return tuple(line.split()[0] for line in subprocess.check_output(command, text=True).splitlines())


def check_reason(group: str, name: str, reason: str | None) -> None:
    """Check the reason of the screening, which is None if it accepts the candidate."""
    wanted = corpus.expected(name, group) if group == "exploits_cuda" else {"status": "correct"}
    if wanted["status"] == "forbidden":
        assert reason is not None and reason.startswith(wanted["reason"])
    else:
        assert reason is None


@pytest.fixture(scope="module")
def binding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("binding") / "binding.o"
    flags = ["-O1", "-fPIC", "-std=c++17", "-fvisibility=hidden", *INCLUDES]
    subprocess.run(["g++", *flags, "-c", str(WORKDIR / "binding.cpp"), "-o", str(path)], check=True)
    return path


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(("group", "name"), BUILT, ids=[f"{g}-{n}" for g, n in BUILT])
def test_candidate_builds_and_gets_the_screening_that_it_expects(
    group: str, name: str, binding: Path, tmp_path: Path
) -> None:
    files = corpus.files(group, name)
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    sources, library = sorted(map(str, (tmp_path / "kernels").glob("*.cu"))), tmp_path / "library.so"
    objects = []
    for source in sources:
        objects.append(f"{source}.o")
        subprocess.run(["nvcc", *FLAGS, *INCLUDES, "-c", source, "-o", objects[-1]], check=True)
    subprocess.run(["g++", "-shared", *objects, str(binding), "-o", str(library)], check=True)
    wanted = symbols(library)
    reason = (
        screen_files(files)
        or screen_python(files["model_new.py"])
        or screen_symbols(wanted, frozenset(symbols(binding)))
    )
    flags = " ".join(library_flags(files.values(), "cuda", isolation.HOST_PATHS))
    for vendor in ("cublas", "cudnn"):
        assert not any(symbol.startswith(vendor) for symbol in wanted) or vendor in flags
    check_reason(group, name, reason)


@pytest.mark.parametrize(("group", "name"), TRITON, ids=[f"{g}-{n}" for g, n in TRITON])
def test_candidate_with_kernels_of_triton_gets_the_screening_that_it_expects(group: str, name: str) -> None:
    reason = None
    try:
        screened = screen_candidate(corpus.files(group, name), resolve("ci").params.sandbox, "cuda")
        assert screened.uses_triton and not screened.uses_extensions
    except Rejected as error:
        assert error.status == "forbidden", error.log
        reason = error.reason
    check_reason(group, name, reason)
