"""Forms in which strangers write tasks and candidates: they are judged, or one sentence names the mistake."""

import copy
import re
from collections.abc import Iterator

import judge_fixtures as corpus
import pytest

from components.core.task import KernelTask
from components.judge.judge import Judge
from components.judge.task_bench import BenchCache

pytestmark = pytest.mark.usefixtures("no_compile_baseline")
SIMD = corpus.files("honest", "simd")


@pytest.fixture(scope="module")
def lenient(judge: Judge) -> Iterator[Judge]:
    """Yield a judge by whose rules a candidate may compute with torch."""
    other = copy.copy(judge)
    sandbox = judge.params.sandbox.model_copy(update={"rules": "any"})
    other.params = judge.params.model_copy(update={"sandbox": sandbox})
    other.bench_cache = BenchCache(judge.bench_cache.capacity)
    yield other
    other.bench_cache.close()


def task(forward: str, inputs: str, init: str = "[]", constructor: str = "pass") -> KernelTask:
    """Return a task; `forward` are the parameters and the body of Model.forward, separated by a colon."""
    parameters, _, body = forward.partition(":")
    code = f"""
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, *arguments, **named):
        super().__init__()
        {constructor}

    def forward(self, {parameters}):
        {body.strip()}

def get_inputs():
    return {inputs}

def get_init_inputs():
    return {init}
"""
    return KernelTask(code=code)


ROWS = "[torch.randn(256, 512)]"
HUGE = "[torch.zeros(1, 1).expand(1 << 31, 1 << 31)]"
DEEP = "[__import__('functools').reduce(lambda inner, _: [inner], range(50_000), 0)]"


@pytest.mark.parametrize(
    "accepted",
    [
        task("x: return torch.max(x, 1)", ROWS),
        task(
            "x: return x * self.scale",
            ROWS,
            "[(512,)]",
            "self.scale = nn.Parameter(torch.ones(arguments[0] + ()))",
        ),
        task("x, y: return x * 2 + 1, y + 1", "[torch.randn(256, 512), torch.empty(0, 4)]"),
        task("x, how: return x * how['by'][0]", "[torch.randn(256, 512), {'by': (3.0, 1)}]"),
    ],
    ids=["named_tuple", "tuple_argument", "empty_tensor", "dictionary_argument"],
)
def test_a_form_that_torch_accepts_is_judged(lenient: Judge, accepted: KernelTask) -> None:
    answer = accepted.code.replace("class Model(", "class ModelNew(")
    verdict = lenient.verdict(accepted, {"model_new.py": answer})
    assert verdict.status == "correct", verdict


@pytest.mark.parametrize(
    ("mistaken", "says"),
    [
        (
            task("x: return x * 2", "torch.randn(256, 512)"),
            r"get_inputs\(\) returns a Tensor; let it",
        ),
        (
            task("x: return x * 2", ROWS, "{'a': 1}"),
            r"get_init_inputs\(\) returns a dict; let it",
        ),
        (
            task("x: return x * 2", ROWS, "[[], {'size': 3}]", "torch.empty(*arguments)"),
            r"Model\(\*get_init_inputs\(\)\) raises .*positional arguments.*\[\[\], \{'size': 3\}\]",
        ),
        (
            task("x: return x[0] * 2", "[[torch.randn(256, 512)]]"),
            r"get_inputs\(\) has a Tensor; besides",
        ),
        (task("x: return {'y': x * 2}", ROWS), r"has a dict among its inputs, outputs or parameters"),
        (task("x: return x.sum().item()", ROWS), r"has a float among its inputs, outputs or parameters"),
        (task("x: return x * 2", ROWS, "[nn.SiLU()]"), r"get_init_inputs\(\) has a SiLU"),
        (task("x: return x.to_sparse()", ROWS), r"has a torch.sparse_coo among"),
        (task("x: return x * torch.randn(512)", ROWS), r"it is not deterministic"),
        (
            task("x: return x[0, 0] * 2", "[torch.zeros(1, 1).expand(1 << 31, 1 << 31)]"),
            r"more than 1099511627776",
        ),
        (
            task(
                "x: return x * 2", ROWS, "[__import__('functools').reduce(lambda a, _: [a], range(50000), 0)]"
            ),
            r"RecursionError|recursion",
        ),
    ],
    ids=[
        *("bare_tensor", "dict_init", "kernelbook", "list_of_tensors", "dict_output", "number_output"),
        *("module_argument", "sparse", "random_forward", "overflowing_shape", "deep_argument"),
    ],
)
def test_a_mistake_of_a_task_is_named_in_a_sentence(judge: Judge, mistaken: KernelTask, says: str) -> None:
    verdict = judge.verdict(mistaken, SIMD)
    assert (verdict.status, verdict.reason) == ("infrastructure", "task")
    assert re.search(says, verdict.log), verdict.log
    assert len(verdict.log.splitlines()) == 1


def test_a_chat_answer_is_named(judge: Judge) -> None:
    fenced = f"Here is the kernel:\n\n```python\n{corpus.MODEL_NEW}\n```\n"
    verdict = judge.verdict(corpus.TASK, SIMD | {"model_new.py": fenced})
    assert verdict.reason == "syntax" and "the file has a Markdown fence" in verdict.log


def test_a_byte_order_mark_is_no_mistake(judge: Judge) -> None:
    marked = {name: f"\ufeff{text}" for name, text in SIMD.items()}
    assert judge.verdict(corpus.TASK, marked).status == "correct"


def test_two_tasks_that_differ_in_a_text_that_the_model_reads_are_two(lenient: Judge) -> None:
    code = task("x: return x * float(Model.__doc__)", ROWS).code
    for factor in ("2", "3"):
        marked = code.replace("Model(nn.Module):\n", f'Model(nn.Module):\n    """{factor}"""\n')
        answer = marked.replace("class Model(", "class ModelNew(").replace(
            "Model.__doc__", "ModelNew.__doc__"
        )
        assert lenient.verdict(KernelTask(code=marked), {"model_new.py": answer}).status == "correct"
