"""Sources are parsed while other threads parse too."""

import ast
import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from components.core.text import parse_python

CODE = "\n".join(f"def f{number}(x):\n    return {'-' * 10}x + [1, (2, {{3: 4}})]" for number in range(60))


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Make threads change also within `ast.parse`, which they do where the garbage collector calls Python."""

    def switch(*_: object) -> None:
        sum(range(50))

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(20)
    gc.callbacks.append(switch)
    yield
    gc.callbacks.remove(switch)
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
def test_threads_that_parse_at_the_same_time_all_get_their_trees() -> None:
    expected = ast.dump(ast.parse(CODE))
    with ThreadPoolExecutor(4) as threads:
        trees = list(threads.map(parse_python, [CODE] * 40))
    assert all(ast.dump(tree) == expected for tree in trees)


def test_a_faulty_source_raises_what_it_raised() -> None:
    with pytest.raises(SyntaxError):
        parse_python("def")
