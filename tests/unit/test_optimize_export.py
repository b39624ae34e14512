"""The text of model_new.py that an optimisation writes."""

import pytest

from components.agent.optimize.export import LOADER, drop_in


@pytest.mark.parametrize(
    "before, rest",
    [
        ('"""A page\x0cbreak."""\n# a\u2028separator\nfrom __future__ import annotations\n', "x = 1\n"),
        ("from __future__ import annotations; ", "x = 1\n"),
        ('"""é"""\n', "@staticmethod\n@staticmethod\ndef f():\n    pass\n"),
        ('"""No statement, and no line feed at the end."""', ""),
    ],
)
def test_the_loader_stands_before_the_first_statement_in_whatever_lines_the_source_is(
    before: str, rest: str
) -> None:
    text = drop_in(before + rest)
    compile(text, "model_new.py", "exec")
    assert text.startswith(before) and text.endswith(f"{LOADER}\n{rest}")
