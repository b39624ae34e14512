"""Screens refuse a candidate's files before anything runs, and hold no other thread up."""

import ast
from pathlib import Path

import judge_fixtures as corpus
import pytest

from components.core.errors import UserError
from components.core.params import Params
from components.judge import screen
from components.judge.candidate import read_workspace
from components.judge.screen import screen_files, screen_symbols
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
    seen = list(screen._nodes(tree))
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
