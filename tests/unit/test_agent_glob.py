"""The patterns of the tool Glob: what matches a slash, and that no pattern is an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.agent.workspace import matches_glob


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        ("model.py", "**", True),
        ("kernels/a.cu", "**", True),
        ("kernels/a.cu", "kernels/**", True),
        ("kernels/a.cu", "**/**/a.cu", True),
        ("kernels/a.cu", "kernels/**/a.cu", True),
        ("kernels/b/c/a.cu", "kernels/**/a.cu", True),
        ("other/kernels/a.cu", "kernels/**", False),
        ("kernels/a.cu", "*", False),
        ("kernels/a.cu", "kernels?a.cu", False),
        ("kernels/a.cu", "kernels[!x]a.cu", False),
        ("kernels/a.cu", "kernels/[!x].c?", True),
        ("kernels/a.cu", "kernels/**.cu", True),
        ("kernels/b/a.cu", "kernels/**.cu", False),
        ("kernels/a.cu", "kernels/a.cu/x", False),
        ("a(.py", "a(.py", True),
        ("a\nb", "a\nb", True),
        ("a.py", "[", False),
        ("[", "[", True),
        ("a", "", False),
    ],
)
def test_only_two_stars_match_a_slash(path: str, pattern: str, expected: bool) -> None:
    assert matches_glob(path, pattern) == expected


@given(st.text("*?[]!-az/\\(", max_size=40))
def test_no_pattern_is_an_error(pattern: str) -> None:
    assert matches_glob("kernels/z/a.cu", pattern) in (True, False)
