"""Forms in which strangers write tasks and candidates: they are judged, or one sentence names the mistake."""

import copy
import re
from collections.abc import Callable, Iterator
from statistics import median

import judge_fixtures as corpus
import pytest
import torch

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
        task("x: return torch.relu_(x)", ROWS),
        task("x: return self.drop(x)", ROWS, constructor="self.drop = nn.Dropout(0.3)"),
        task(
            "x: return self.layer(x)",
            ROWS,
            constructor="self.layer = nn.utils.weight_norm(nn.Linear(512, 64))",
        ),
        task(
            "x, y: return nn.functional.binary_cross_entropy(x, y, reduction='none')",
            "[torch.rand(64, 512), torch.rand(64, 512).round()]",
        ),
        task(
            "x, y: return nn.functional.kl_div(x, y, reduction='batchmean')",
            "[torch.randn(64, 512).log_softmax(-1), torch.randn(64, 512).softmax(-1)]",
        ),
        task("x: return x.topk(4)", ROWS),
        task(
            "x: return torch.linalg.cholesky(x)",
            "[(lambda a: a @ a.mT + 64 * torch.eye(64))(torch.randn(64, 64))]",
        ),
        task("x, y: return torch.searchsorted(x, y)", "[torch.randn(512).sort()[0], torch.randn(4096)]"),
        task("x, mask: return (x * mask).cumsum(1)", "[torch.randn(64, 512), torch.rand(64, 512) > 0.5]"),
        task(
            "x: return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=512)",
            ROWS,
            constructor="self.filter = nn.Parameter(torch.randn(257, dtype=torch.cfloat))",
        ),
        task(
            "x, y, z: return (x + y).mm(z.t())",
            "[torch.randn(64, 64).t(), torch.randn(1, 64).expand(64, 64), "
            "torch.randn(64, 64, requires_grad=True)]",
        ),
    ],
    ids=[
        *("named_tuple", "tuple_argument", "empty_tensor", "dictionary_argument", "in_place", "identity"),
        *("weight_norm", "probabilities", "divergence", "ties", "positive_definite", "sorted_edges"),
        *("mask", "complex_parameter", "strided_inputs"),
    ],
)
def test_a_form_that_torch_accepts_is_judged(lenient: Judge, accepted: KernelTask) -> None:
    answer = accepted.code.replace("class Model(", "class ModelNew(")
    # A candidate, unlike a task, returns memory of its own.
    answer = answer.replace("relu_(x)", "relu(x)").replace("self.drop(x)", "self.drop(x).clone()")
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
            task("x: return x[x > 0]", ROWS),
            r"an output has the shape \[\d+\] in one call and \[\d+\] in another",
        ),
        (
            task("x: return x * 2", "[torch.randn(torch.randint(1, 4096, ()).item(), 8)]"),
            r"an input has the shape \[\d+, 8\] in one call and",
        ),
        pytest.param(
            task("x: return x * 2", "[torch.randn(256, 512).cuda()]"),
            r"the task puts tensors on a GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"),
        ),
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
        *("module_argument", "sparse", "random_forward", "shape_of_output", "shape_of_input", "on_a_gpu"),
        *("overflowing_shape", "deep_argument"),
    ],
)
def test_a_mistake_of_a_task_is_named_in_a_sentence(judge: Judge, mistaken: KernelTask, says: str) -> None:
    verdict = judge.verdict(mistaken, SIMD)
    assert (verdict.status, verdict.reason) == ("infrastructure", "task")
    assert re.search(says, verdict.log), verdict.log
    assert len(verdict.log.splitlines()) == 1


@pytest.mark.parametrize("answer", ["x * torch.randn(512)", "x * 2"])
def test_by_no_label_a_random_task_is_the_candidates_fault(judge: Judge, answer: str) -> None:
    random, labelled = task("x: return x * torch.randn(512)", ROWS), copy.copy(judge)
    sandbox = judge.params.sandbox.model_copy(update={"rules": "any", "tolerance": "kernelbench"})
    labelled.params = judge.params.model_copy(update={"sandbox": sandbox})
    labelled.bench_cache = BenchCache(1)
    files = {
        "model_new.py": random.code.replace("class Model(", "class ModelNew(").replace(
            "x * torch.randn(512)", answer
        )
    }
    verdict = labelled.verdict(random, files)
    labelled.bench_cache.close()
    assert (verdict.status, verdict.reason) == ("infrastructure", "task")
    assert "it is not deterministic" in verdict.log


def test_a_random_tensor_outside_the_state_is_judged_by_seed(judge: Judge) -> None:
    random = task("x: return x + self.start", ROWS, constructor="self.start = torch.randn(512)")
    files = {"model_new.py": random.code.replace("class Model(", "class ModelNew(")}
    for weights, status in (("state_dict", "infrastructure"), ("seed", "correct")):
        labelled = copy.copy(judge)
        sandbox = judge.params.sandbox.model_copy(update={"rules": "any", "weights": weights})
        labelled.params = judge.params.model_copy(update={"sandbox": sandbox})
        labelled.bench_cache = BenchCache(1)
        verdict = labelled.verdict(random, files)
        labelled.bench_cache.close()
        assert verdict.status == status, verdict
        assert status == "correct" or "--weights seed judges it" in verdict.log


def test_conditions_that_people_overlook_are_named(lenient: Judge) -> None:
    """A buffer is a parameter like others, and modules run in evaluation mode."""
    constant = task(
        "x: return x * self.k", ROWS, constructor="self.register_buffer('k', torch.tensor([2.0]))"
    )
    normalised = task("x: return self.norm(x)", ROWS, constructor="self.norm = nn.BatchNorm1d(512)")
    for judged, answer in (
        (constant, constant.code.replace("x * self.k", "x * 2.0")),
        (
            normalised,
            normalised.code.replace("self.norm(x)", "nn.functional.batch_norm(x, None, None, training=True)"),
        ),
    ):
        verdict = lenient.verdict(judged, {"model_new.py": answer.replace("class Model(", "class ModelNew(")})
        assert (verdict.status, verdict.reason) == ("wrong_output", "max_error:given")
        assert "Modules run in evaluation mode, and parameters and buffers have new values" in verdict.log


def test_a_chat_answer_is_named(judge: Judge) -> None:
    fenced = f"Here is the kernel:\n\n```python\n{corpus.MODEL_NEW}\n```\n"
    verdict = judge.verdict(corpus.TASK, SIMD | {"model_new.py": fenced})
    assert verdict.reason == "syntax" and "the file has a Markdown fence" in verdict.log


@pytest.mark.parametrize("change", [lambda text: f"\ufeff{text}", lambda text: text.replace("\n", "\r\n")])
def test_byte_order_marks_and_line_ends_of_windows_are_no_mistakes(
    judge: Judge, change: Callable[[str], str]
) -> None:
    marked = {name: change(text) for name, text in SIMD.items()}
    assert judge.verdict(corpus.TASK, marked).status == "correct"


def test_an_ignored_complex_parameter_is_wrong(lenient: Judge) -> None:
    drawn = "torch.randn(257, dtype=torch.complex64)"
    filtered = task(
        "x: return torch.fft.rfft(x) * self.filter", ROWS, constructor=f"self.filter = nn.Parameter({drawn})"
    )
    remembered = (
        filtered.code.replace("class Model(", "class ModelNew(")
        .replace("        self.filter =", f"        torch.manual_seed(0); self.kept = {drawn}; self.filter =")
        .replace("* self.filter", "* self.kept")
    )
    verdict = lenient.verdict(filtered, {"model_new.py": remembered})
    assert verdict.status == "wrong_output", verdict


def test_two_tasks_that_differ_in_a_text_that_the_model_reads_are_two(lenient: Judge) -> None:
    code = task("x: return x * float(Model.__doc__)", ROWS).code
    for factor in ("2", "3"):
        marked = code.replace("Model(nn.Module):\n", f'Model(nn.Module):\n    """{factor}"""\n')
        answer = marked.replace("class Model(", "class ModelNew(").replace(
            "Model.__doc__", "ModelNew.__doc__"
        )
        assert lenient.verdict(KernelTask(code=marked), {"model_new.py": answer}).status == "correct"


def test_a_short_task_is_as_fast_as_itself(lenient: Judge) -> None:
    """A call takes less time than what the judge does between two calls."""
    source = task("x: return x.softmax(1)", "[torch.randn(1, 4096)]")
    ratios = []
    for number in range(25):
        files = {"model_new.py": f"{source.code.replace('class Model(', 'class ModelNew(')}# {number}\n"}
        speedup = lenient.verdict(source, files, compare_compile=None).speedup.eager
        assert speedup is not None
        ratios.append(speedup.estimate)
    assert 0.91 <= median(ratios) <= 1.1, ratios
