"""Candidates of one Python file: the judge finds and builds their extensions, and tricks gain nothing."""

import judge_fixtures as corpus
import pytest

from components.core.params import Params
from components.judge import candidate
from components.judge.judge import Judge
from components.judge.verdict import Verdict

pytestmark = pytest.mark.usefixtures("no_compile_baseline")

# Python's own interface, because torch's headers take half a minute (tests/nightly/test_torch_extension.py).
KERNEL = r"""
#include <Python.h>
#include <cmath>
#include <cstdlib>
#define JOIN(a, b) a##b
#define INIT(name) JOIN(PyInit_, name)

static PyObject* forward(PyObject*, PyObject* arguments) {
  unsigned long long x, scale, y;
  long long rows, columns;
  if (!PyArg_ParseTuple(arguments, "KKKLL", &x, &scale, &y, &rows, &columns)) return nullptr;
  const float *a = (const float*)x, *s = (const float*)scale;
  float* out = (float*)y;
  for (long long i = 0; i < rows * columns; ++i) {
    const float v = 1.0f / (1.0f + std::exp(-a[i])) * s[i %% columns] - 0.3f;
    out[i] = v > 0.0f ? v : 0.1f * v;
  }
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"forward", forward, METH_VARARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fused", "", -1, methods};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { %s return PyModule_Create(&module); }
"""
FILE = '''
import os
import time
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""{source}"""
{before}
fused = load_inline(
    name="fused", cpp_sources={sources}, extra_cflags=["-O3", "-ffast-math"], no_implicit_headers=True
)

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        out = torch.empty_like(x)
        fused.forward(x.data_ptr(), self.scale.data_ptr(), out.data_ptr(), x.size(0), x.size(1))
        {after}
        return out

def get_inputs():
    return [torch.randn(256, 1024)]

if __name__ == "__main__":
    print(time.time(), os.getpid(), ModelNew()(*get_inputs()))
'''


def single_file(
    source: str = KERNEL % "", sources: str = "[SOURCE]", before: str = "", after: str = ""
) -> dict[str, str]:
    return {"model_new.py": FILE.format(source=source, sources=sources, before=before, after=after)}


@pytest.fixture
def any_rules(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> Judge:
    sandbox = judge.params.sandbox.model_copy(update={"rules": "any"})
    params: Params = judge.params.model_copy(update={"sandbox": sandbox})
    monkeypatch.setattr(judge, "params", params)
    return judge


def judged(judge: Judge, files: dict[str, str]) -> Verdict:
    return judge.verdict(corpus.TASK, files)


def test_a_file_with_an_inline_kernel_is_correct(judge: Judge) -> None:
    verdict = judged(judge, single_file())
    assert verdict.status == "correct", (verdict.reason, verdict.log)


@pytest.mark.parametrize(
    "sources",
    [
        "SOURCE.strip()",
        "f'// {\"one\"}\\n{SOURCE}'",
        '["// {} {word}\\n".format("a", word="b") + SOURCE]',
        "('// first\\n', SOURCE)",
    ],
)
def test_sources_are_what_the_file_passes_when_it_runs(sources: str, any_rules: Judge) -> None:
    verdict = judged(any_rules, single_file(sources=sources))
    assert verdict.status == "correct", (verdict.reason, verdict.log)


def test_computed_sources_are_recorded_in_a_runner(any_rules: Judge) -> None:
    files = single_file(sources="TEXT", before="TEXT = '\\n'.join(reversed(SOURCE.splitlines()[::-1]))")
    verdict = judged(any_rules, files)
    assert verdict.status == "correct", (verdict.reason, verdict.log)


def test_a_file_that_records_other_sources_than_it_runs_is_not_loaded(any_rules: Judge) -> None:
    """The stand-in of a recorder has no file, so a candidate can tell it from the built extension."""
    before = """
import glob
TEXT = SOURCE if glob.glob("extension_0*") else SOURCE + "// recorded"
"""
    verdict = judged(any_rules, single_file(sources="TEXT", before=before))
    assert (verdict.status, verdict.reason) == ("load_failed", "import"), verdict.log
    assert "the judge has built no extension with these sources" in verdict.log


def test_an_extension_that_does_not_compile_raises_in_the_file_under_any_rules(any_rules: Judge) -> None:
    """As with torch's own `load_inline`: a file that catches the error answers by other means."""
    broken = single_file(source="this is no C++")["model_new.py"]
    verdict = judged(any_rules, {"model_new.py": broken})
    assert (verdict.status, verdict.reason) == ("build_failed", "compiler"), verdict.log

    call, body = broken.index("fused = load_inline("), broken.index("class ModelNew")
    caught = (
        broken[:call]
        + "try:\n    "
        + broken[call:body].strip().replace("\n", "\n    ")
        + "\nexcept Exception:\n    fused = None\n\n"
        + broken[body:]
    )
    start, end = caught.index("        out = torch.empty_like"), caught.index("def get_inputs")
    answers = "        return torch.nn.functional.leaky_relu(torch.sigmoid(x) * self.scale - 0.3, 0.1)\n\n"
    verdict = judged(any_rules, {"model_new.py": caught[:start] + answers + caught[end:]})
    assert verdict.status == "correct", (verdict.reason, verdict.log)
    assert verdict.evidence["extensions_not_built"] == ["fused"]


@pytest.mark.parametrize(
    ("before", "status", "reason"),
    [
        ("TEXT = SOURCE * 1; os._exit(0)", "crashed", "process_died"),
        ("TEXT = SOURCE * 1; os.fork()", "load_failed", "import"),
        ("TEXT = SOURCE * 1; import subprocess; subprocess.run(['true'])", "load_failed", "import"),
        ("TEXT = ['a' * 3_000_000]", "load_failed", "extension_sources"),
        ("TEXT = SOURCE.replace('x', 'x'); 1 / 0", "load_failed", "import"),
    ],
    ids=["exit", "fork", "exec", "flood", "error"],
)
def test_nothing_escapes_through_the_recorder(
    before: str, status: str, reason: str, any_rules: Judge
) -> None:
    verdict = judged(any_rules, single_file(sources="TEXT", before=before))
    assert (verdict.status, verdict.reason) == (status, reason), verdict.log


@pytest.mark.parametrize(
    ("source", "status", "reason"),
    [
        ("#include </etc/shadow>\n" + KERNEL % "", "build_failed", "compiler"),
        (KERNEL % 'system("true");', "forbidden", "symbol:system"),
        (KERNEL % "abort();", "crashed", "process_died"),
        (
            (KERNEL % "").replace("static PyObject* forward", "static PyObject* hidden"),
            "build_failed",
            "compiler",
        ),
    ],
    ids=["include", "symbol", "import", "syntax"],
)
def test_work_at_build_or_import_gains_nothing(source: str, status: str, reason: str, judge: Judge) -> None:
    verdict = judged(judge, single_file(source))
    assert (verdict.status, verdict.reason) == (status, reason), verdict.log


def test_a_compiler_flag_that_loads_code_is_refused(judge: Judge) -> None:
    for flag in ("-fplugin=/tmp/a.so", "-Wl,-rpath,/tmp", "-I/tmp", "-include", "@file", "-wrapper"):
        files = {"model_new.py": single_file()["model_new.py"].replace("-ffast-math", flag)}
        verdict = judged(judge, files)
        assert (verdict.status, verdict.reason) == ("load_failed", f"flag:{flag}"), verdict.log


def test_cuda_sources_are_refused_on_cpu(judge: Judge) -> None:
    files = {
        "model_new.py": single_file()["model_new.py"].replace(
            'name="fused"', 'name="fused", cuda_sources="//"'
        )
    }
    assert judged(judge, files).reason == "cuda_sources"


def test_run_time_compilers_are_refused_in_one_sentence(any_rules: Judge) -> None:
    for line, name, sentence in (
        ("import triton", "triton", "with --device cuda"),
        ("from numba import cuda", "numba", "that the judge itself builds"),
        ("f = torch.compile", "torch.compile", "may start no process"),
    ):
        verdict = judged(any_rules, single_file(before=line))
        assert (verdict.status, verdict.reason) == ("load_failed", f"unsupported:{name}")
        assert sentence in verdict.log and "\n" not in verdict.log


@pytest.mark.parametrize("cheat", ["torch.sigmoid(x)", "fused = torch\n        fused.sigmoid(x)"])
def test_torch_compute_beside_an_extension_is_refused(
    cheat: str, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = single_file(after=cheat)
    assert judged(judge, files).status == "forbidden"
    monkeypatch.setattr(candidate, "screen_python", lambda code: None)
    if "fused" not in cheat:
        assert judged(judge, files).reason == "torch_compute:aten.sigmoid"


@pytest.mark.parametrize(
    ("line", "status", "reason"),
    [
        ("x = x.to(x.device, x.dtype).clone()", "correct", ""),
        ("x = x.float().split(x.shape[0])[0]", "correct", ""),
        ("x = x.to(torch.float64)", "forbidden", "torch_compute:aten._to_copy"),
        ("x = x.type_as(torch.empty(1, dtype=torch.float16))", "forbidden", "torch_compute:aten._to_copy"),
        ("x = torch.empty_like(x).copy_(torch.empty_like(x, dtype=torch.float64).copy_(x))", "correct", ""),
        ("self.reset_parameters()", "forbidden", "torch_compute:aten.uniform_"),
    ],
)
def test_tensors_may_be_copied_and_are_converted_by_copies_only(
    line: str, status: str, reason: str, judge: Judge
) -> None:
    method = "    def reset_parameters(self):\n        nn.init.uniform_(self.scale)\n\n    def forward"
    model = corpus.MODEL_NEW.replace("    def forward", method).replace(
        "out = torch", f"{line}\n        out = torch"
    )
    verdict = judge.verdict(corpus.TASK, corpus.files("honest", "simd") | {"model_new.py": model})
    assert (verdict.status, verdict.reason) == (status, reason), verdict.log
