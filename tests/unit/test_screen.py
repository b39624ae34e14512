"""Screens refuse a candidate's files before anything runs, and hold no other thread up."""

import ast
import json
import os
from pathlib import Path

import judge_fixtures as corpus
import pytest

from components.core.errors import UserError
from components.core.params import Params
from components.judge import screen
from components.judge.candidate import read_workspace
from components.judge.screen import screen_files
from components.judge.symbol_screen import screen_symbols
from components.sandbox.build import Builder


def test_symbols_of_other_libraries_are_refused() -> None:
    assert (
        screen_symbols(
            ("malloc@GLIBC_2.2.5", "_ZNSt6thread4joinEv", "PyList_New", "expf@GLIBC_2.27"), frozenset()
        )
        is None
    )
    assert screen_symbols(("__nehf2@GCC_12.0.0", "__truncdfhf2"), frozenset()) is None, "of _Float16"
    for symbol in ("dlopen@GLIBC_2.34", "_ZN2at5emptyE", "cblas_sgemm", "cudaIpcOpenMemHandle"):
        assert screen_symbols((symbol,), frozenset()) == f"symbol:{symbol.partition('@')[0]}"


def test_what_a_compiler_makes_of_parallel_for_is_allowed() -> None:
    """Whether the last two are inline depends on the compiler's flags."""
    called = ("14get_thread_numEv", "18in_parallel_regionEv", "8internal14set_thread_numEi")
    names = (*called, "16init_num_threadsEv", "8internal21lazy_init_num_threadsEv")
    assert screen_symbols(tuple(f"_ZN2at{name}" for name in names), frozenset()) is None


def test_constructors_within_constructors_are_walked_once() -> None:
    nested = "".join(f"{' ' * depth}def __init__():\n" for depth in range(90)) + "".join(
        f"{' ' * 90}a\n" for _ in range(500)
    )
    tree = ast.parse(nested)
    seen = list(screen._nodes(tree, screen._own_kernels(tree)))
    assert [node for node, _ in seen] == list(ast.walk(tree)) and [
        inside for node, inside in seen if isinstance(node, ast.Expr)
    ] == [True] * 500


def test_kernels_behind_a_link_or_too_many_of_them_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "model_new.py").write_text(corpus.MODEL_NEW)
    (tmp_path / "kernels").symlink_to("/etc")
    with pytest.raises(UserError, match=r"kernels: a symbolic link"):
        read_workspace(tmp_path)
    (tmp_path / "kernels").unlink()
    (tmp_path / "kernels").mkdir()
    for number in range(201):
        (tmp_path / "kernels" / f"{number}.cpp").touch()
    with pytest.raises(UserError, match=r"kernels: more than 200 files"):
        read_workspace(tmp_path)


def test_a_file_whose_name_is_not_unicode_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "model_new.py").write_text(corpus.MODEL_NEW)
    (tmp_path / "kernels").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "kernels") + b"/\xff.cpp")).touch()
    files = read_workspace(tmp_path)
    assert screen_files(files) == "file_name:kernels/\ufffd.cpp"
    json.dumps(files, ensure_ascii=False).encode()  # as in a request to a service


def test_a_home_with_blanks_in_its_name_builds(ci_params: Params, tmp_path: Path) -> None:
    home = tmp_path / "a home ü"
    home.mkdir()
    built = Builder(ci_params.sandbox, "cpu", home / "builds").build(corpus.files("honest", "simd"))
    assert built.library is not None and "system" not in built.symbols, built.log


def test_plain_kernel_names_are_accepted() -> None:
    assert screen_files({"model_new.py": "", "kernels/forward.cpp": "", "kernels/helper_2.cuh": ""}) is None


def test_only_the_main_block_is_removed_of_the_blocks_that_mention_the_modules_name() -> None:
    main = "if __name__ == '__main__':\n    print(1)"
    kept = ["if __name__ != '__main__':\n    x = 1", f"{main}\nelse:\n    x = 1"]
    code = screen.without_unused_parts(ast.parse("\n".join((main, *kept))))
    assert ast.unparse(code) == "\n".join(kept)


def test_a_name_that_is_bound_to_an_extension_elsewhere_is_no_extension() -> None:
    extension = "load_inline(name='m', cpp_sources='int a;')"
    code = (
        "import torch\nfrom torch.utils.cpp_extension import load_inline\n"
        f"def unused():\n    torch = {extension}\nx = {extension}\n"
        "def forward(self, x):\n    return torch.from_numpy(x.numpy())\n"
    )
    assert screen.screen_python(code) == "call:torch.from_numpy"
    assert screen.screen_python(code.replace("torch.from_numpy(", "(")) == "call:x.numpy"
    assert screen.screen_python(code.partition("def unused")[0] + f"m = {extension}\nm.run(1)\n") is None


OWN = """
import torch
import torch.nn as nn
import cuda_extension


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.kaiming_uniform_(self.weight)

    def forward(self, x):
        shape, weight = list(x.shape), self.weight.to(x.device, x.dtype)
        width = shape.pop()
        out = x.clone().zero_() if width.bit_length() > 3 else torch.empty_like(x)
        cuda_extension.forward(x, weight.to(memory_format=torch.channels_last), out)
        return out
"""


def test_a_file_may_copy_tensors_and_set_parameters_up_in_a_method_and_not_name_what_computes() -> None:
    assert screen.screen_python(OWN) is None
    assert screen.screen_python(OWN.replace("zero_()", "mean()")) == "call:mean"
    for entrance in (
        "torch._C",
        "torch.ops.aten",
        "torch.jit",
        "nn.functional._jit_internal",
        "torch.distributed",
    ):
        hidden = OWN.replace("self.reset_parameters()", f"self.entrance = {entrance}")
        assert screen.screen_python(hidden) == f"attribute:{entrance}"
    misplaced = OWN.replace("def reset_parameters", "def draw")
    assert screen.screen_python(misplaced) == "call:nn.init.kaiming_uniform_"


TRITON = """
import torch
import torch.nn as nn
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.autotune(
    configs=[triton.Config({"BLOCK": b}, num_warps=w) for b in (128, 256) for w in (4, 8)], key=["n"]
)
@triton.jit
def softplus_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(y + at, libdevice.log1p(tl.exp(value)).to(tl.float32), mask=at < n)


class ModelNew(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        n = x.numel()
        softplus_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
        return y
"""


def test_a_file_with_kernels_of_triton_is_accepted() -> None:
    assert screen.screen_python(TRITON) is None


@pytest.mark.parametrize(
    ("part", "other"),
    [
        (
            "        softplus_kernel[",
            "        with torch.cuda.device(x.device):\n            softplus_kernel[",
        ),
        ("(x, y, n)\n", "(x, y, n, num_stages=2, OUT=tl.float32)\n"),
        ("tl.exp(value)", "tl.math.exp(value) + tl.extra.cuda.libdevice.exp(value)"),
        ("tl.exp(value)", "tl.where(value > math.pi, value.to(tl.float16), triton.cdiv(BLOCK, 2))"),
        ("tl.exp(value)", "softplus_kernel(value)"),
        ("y = torch.empty_like(x)", "y: torch.Tensor = torch.empty(x.shape, dtype=torch.float32)"),
    ],
)
def test_what_files_with_kernels_of_triton_do_is_accepted(part: str, other: str) -> None:
    assert part in TRITON
    assert screen.screen_python(f"import math\n{TRITON.replace(part, other, 1)}") is None


@pytest.mark.parametrize(
    ("honest", "cheat", "reason"),
    [
        # The function of a kernel in Python, and what could put another function in Triton's place.
        ("return y", "f = softplus_kernel.fn\n        return f(x)", ""),
        ("return y", "f = softplus_kernel.base_fn\n        return f(x)", "attribute:base_fn"),
        ("return y", "f = softplus_kernel.__wrapped__\n        return f(x)", "attribute:__wrapped__"),
        ("@triton.jit", "@torch.compile\n@triton.jit", "attribute:torch.compile"),
        ("@triton.jit\n", "", "call:"),
        ("@triton.autotune", "triton.jit = lambda f: f\n@triton.autotune", "attribute:triton.jit"),
        ("@triton.autotune", "class triton: jit = nn.Module\n@triton.autotune", "call:"),
        ("y = torch.empty_like(x)", "tl = torch; y = tl.constexpr(x)", "kernel:tl"),
        ("n = x.numel()", "softplus_kernel = {0: torch.exp}; n = 0", "call:softplus_kernel[]"),
        # Modules under another name, and functions that write files where kernels are compiled.
        ("return y", "self.b = triton.runtime.build", "attribute:triton.runtime.build"),
        ("return y", "triton.knobs.build.impl = x", "attribute:triton.knobs.build.impl"),
        ("return y", "self.t = torch", "name:torch"),
        ("return y", "return (torch or x).view(1)", "name:torch"),
        ("return y", "self.save = torch.save", "attribute:torch.save"),
        (
            "def forward",
            "def __init__(self):\n        torch.save(1, 'a')\n\n    def forward",
            "call:torch.save",
        ),
        ("num_warps=w", "num_warps=w, ir_override='a.ptx'", "call:triton.Config(ir_override)"),
        ("num_warps=w", "**{'ir_override': 'a.ptx'}", "call:triton.Config(ir_override)"),
        ("return y", "self.c = softplus_kernel.get_capture_scope", "name:softplus_kernel.get_capture_scope"),
        ("return y", "softplus_kernel.pre_run_hooks.append(x)", "call:softplus_kernel.pre_run_hooks.append"),
        ("return y", "softplus_kernel.used_global_vals.values()", "call:softplus_kernel.used_global_vals"),
        ("return y", "softplus_kernel._src = 'a'", "name:softplus_kernel._src"),
        ("return y", "[k for k in (softplus_kernel,)]", "name:softplus_kernel"),
        # Triton's compiler calls what the body of a kernel names.
        ("tl.exp(value)", "torch.save(value, 'triton/a')", "kernel:torch.save"),
        ("tl.exp(value)", "tl.core.inspect.os.system('a')", "kernel:tl.core.inspect.os.system"),
        ("tl.exp(value)", "tl.extra.modules['os']", "kernel:tl.extra.modules"),
        ("tl.exp(value)", "libdevice.core", "kernel:libdevice.core"),
        ("tl.exp(value)", "getattr(value, 'a')", "kernel:getattr"),
        ("tl.exp(value)", "(tl.math)", "kernel:tl.math"),
        ("tl.exp(value)", "softplus_kernel.used_global_vals", "kernel:softplus_kernel.used_global_vals"),
        ("tl.exp(value)", "value.__class__", "kernel:value.__class__"),
        ("    value = tl.load", "    import os\n    value = tl.load", "kernel:import"),
        # Defaults, annotations and decorators of a kernel are executed in Python.
        (": tl.constexpr", "=torch.exp(torch.zeros(1))", "call:torch.exp"),
        ("BLOCK: tl.constexpr", "BLOCK: torch.exp(1)", "call:torch.exp"),
        ('key=["n"]', "key=[torch.exp(1)]", "call:torch.exp"),
        ("return y", "return torch.exp(y)", "call:torch.exp"),
        ("return y", "return tl.exp(y)", "call:tl.exp"),
        ("import triton\n", "import triton\nimport triton.runtime\n", "import:triton.runtime"),
        ("from triton.language.extra import libdevice", "from triton import knobs", "import:triton"),
    ],
)
def test_a_file_with_kernels_of_triton_may_not_compute_otherwise(
    honest: str, cheat: str, reason: str
) -> None:
    assert honest in TRITON
    assert (screen.screen_python(TRITON.replace(honest, cheat, 1)) or "").startswith(reason)
