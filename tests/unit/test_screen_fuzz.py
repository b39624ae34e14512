"""Screening answers any text, file name and compiler flag with a verdict, without another error, in time."""

import time

import judge_fixtures as corpus
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.config import resolve
from components.judge.candidate import _validated, _words, screen_candidate
from components.judge.verdict import Rejected
from components.sandbox.compilers import refused_flag

SECONDS = 30.0  # each takes less than half a second; in quadratic time they would take minutes
HONEST = [corpus.files("honest", name)["model_new.py"] for name in corpus.names("honest")]
RULES = [resolve("ci").params.sandbox.model_copy(update={"rules": rules}) for rules in ("kernel-only", "any")]
EXTREMES = {
    "brackets": "(" * 100_000,
    "calls": "f(" * 20_000 + ")" * 20_000,
    "short_brackets": "x = " + "[" * 190 + "]" * 190,
    "attributes": "a" + ".b" * 30_000,
    "chained_calls": "a" + ".b()" * 15_000,
    "sum": "x = 1" + " + 1" * 15_000,
    "unary": "x = " + "not " * 15_000 + "1",
    "comparison": "x = 1" + " < 1" * 15_000,
    "blocks": "".join(f"{' ' * depth}if 1:\n" for depth in range(120)) + " " * 120 + "pass",
    "digits": "x = " + "9" * 60_000,
    "f_string": "x = " + "f'{" * 60 + "1" + "}'" * 60,
    "nul": "import torch\0",
    "surrogate": "x = '\ud800'",
    "escape": "x = '\\N{' + '\\ud800'",
    "mark": "\ufeff\ufeffimport torch",
    "coding": "# -*- coding: utf-7 -*-\nx = '+AGE-'",
    "backslash": "\\",
    "form_feed": "\f" * 60_000,
    "registrations": "x = '" + "TORCH_LIBRARY(" * 4_000 + "'",
    "extensions": "from torch.utils.cpp_extension import load_inline\n" + "x = load_inline('a')\n" * 2_000,
    "nested_extension": "from torch.utils.cpp_extension import load\nx = " + "load(" * 90 + ")" * 90,
}

PIECES = [*"()[]{}:\"'\\\0\n\t#@*=.", "\ufeff", "\ud800", "def ", "lambda: ", "f'{", '"""']
NAMES = ["kernels/" + "a" * 200, "kernels/../x", "kernels/a\n", "/", ""]
FLAGS = ["-O3", "-D", "-Xptxas -O3", "'", "\\", "-fplugin=x"]
REQUESTS = [b"[" * 900_000, b"[" + b"9" * 9_000 + b"]", b'["\\ud800"]']
pieces = st.sampled_from(PIECES) | st.text(max_size=3)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """Draw an honest source that is cut, and in which pieces are replaced."""
    code = draw(st.sampled_from(HONEST))
    for _ in range(draw(st.integers(0, 3))):
        start, length = draw(st.integers(0, len(code))), draw(st.integers(0, 40))
        code = code[:start] + draw(pieces) * draw(st.integers(1, 200)) + code[start + length :]
    return code[: draw(st.integers(0, len(code)))] if draw(st.booleans()) else code


def screen(files: dict[str, str]) -> None:
    for rules in RULES:
        start = time.thread_time()
        try:
            screen_candidate(files, rules, "cuda")
        except Rejected as rejected:
            assert rejected.status in ("load_failed", "forbidden") and rejected.reason
        assert time.thread_time() - start < SECONDS


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
@given(mutated())
def test_a_mutated_source_gets_a_verdict(code: str) -> None:
    screen({"model_new.py": code})


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("name", EXTREMES)
def test_an_extreme_source_gets_a_verdict(name: str) -> None:
    screen({"model_new.py": EXTREMES[name]})
    screen({"model_new.py": corpus.MODEL_NEW + EXTREMES[name]})


@given(st.text(max_size=120) | st.sampled_from(NAMES))
def test_a_file_name_gets_a_verdict(name: str) -> None:
    screen({"model_new.py": corpus.MODEL_NEW, name: "", f"kernels/{name}": ""})


@given(st.lists(st.text(max_size=30) | st.sampled_from(FLAGS)))
def test_compiler_flags_are_taken_or_refused(flags: list[str]) -> None:
    try:
        words = _words(flags)
    except ValueError:
        return
    assert refused_flag(words) in (None, *words)


@given(st.binary(max_size=200) | st.sampled_from(REQUESTS))
def test_a_request_for_extensions_is_taken_or_refused(request: bytes) -> None:
    try:
        assert _validated(request) == []
    except Rejected as rejected:
        assert rejected.reason == "extension_sources"
