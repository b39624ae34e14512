"""Verdicts under other rules, weights and tolerances, and that no cheat gains more by them."""

import copy
import re
from collections.abc import Callable, Iterator

import judge_fixtures as corpus
import pytest

from components.core.task import KernelTask
from components.judge.judge import Judge
from components.judge.result_memory import ResultMemory
from components.judge.task_bench import BenchCache
from components.judge.verdict import Labels

pytestmark = pytest.mark.usefixtures("no_compile_baseline")

TORCH = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))
        self.kept = dict()

    def forward(self, x):
        return {answer}
"""
HONEST = "F.leaky_relu(torch.sigmoid(x) * self.scale - 0.3, 0.1)"
# A task whose weights are random, and a candidate that keeps them under another name.
RANDOM_TASK = KernelTask(
    code=corpus.CODE.replace("torch.ones(1024)", "torch.randn(1024)").replace("self.scale", "self.weight")
)
RENAMED = TORCH.replace("torch.ones(1024)", "torch.randn(1024)")
# Inputs and weights of KernelBench's public seed.
GUESSED = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024))
        torch.manual_seed(42)
        known = torch.randn(256, 1024)
        torch.manual_seed(torch.initial_seed())
        self.known = F.leaky_relu(torch.sigmoid(known) * self.weight - 0.3, 0.1)

    def forward(self, x):
        return self.known.clone()
"""


@pytest.fixture(scope="module")
def judge_with(judge: Judge) -> Iterator[Callable[..., Judge]]:
    """Return the session's judge with other labels, and with task benches of its own."""
    made: dict[Labels, Judge] = {}

    def make(**labels: str) -> Judge:
        key = Labels.model_validate(labels)
        if key not in made:
            made[key] = copy.copy(judge)
            sandbox = judge.params.sandbox.model_copy(update=key.model_dump())
            made[key].params = judge.params.model_copy(update={"sandbox": sandbox})
            made[key].bench_cache = BenchCache(2)
        return made[key]

    yield make
    for labelled in made.values():
        labelled.bench_cache.close()


def test_torch_may_compute_only_by_the_rules_that_say_so(
    judge: Judge, judge_with: Callable[..., Judge]
) -> None:
    files = {"model_new.py": TORCH.format(answer=HONEST)}
    verdict = judge_with(rules="any").verdict(corpus.TASK, files)
    assert (verdict.status, verdict.evidence["labels"]["rules"]) == ("correct", "any"), verdict.log
    refused = judge.verdict(corpus.TASK, files)
    assert (refused.status, refused.evidence["labels"]) == ("forbidden", Labels().model_dump())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (f"self.kept.setdefault(x.data_ptr(), {HONEST})", ("finite_mask", "max_error")),
        ("torch.zeros_like(x)", "max_error"),
        (f"{HONEST}.half().float()", "max_error"),
        ("x.sigmoid_()", "output_aliases_input"),
    ],
    ids=["cached", "zeros", "half", "in_place"],
)
def test_a_cheat_is_wrong_by_any_rules(
    answer: str, reason: str | tuple[str, ...], judge_with: Callable[..., Judge]
) -> None:
    files = {"model_new.py": TORCH.format(answer=answer)}
    verdict = judge_with(rules="any").verdict(corpus.TASK, files)
    assert verdict.status == "wrong_output", (verdict.status, verdict.reason, verdict.log)
    assert verdict.reason.startswith(reason), (verdict.reason, verdict.log)


def test_weights_by_seed_need_no_common_names(judge_with: Callable[..., Judge]) -> None:
    files = {"model_new.py": RENAMED.format(answer=HONEST)}
    by_seed = judge_with(rules="any", weights="seed").verdict(RANDOM_TASK, files)
    assert by_seed.status == "correct", (by_seed.reason, by_seed.log)
    by_name = judge_with(rules="any").verdict(RANDOM_TASK, files)
    assert (by_name.status, by_name.reason) == ("load_failed", "import")
    assert "missing ['weight'], unexpected ['scale']" in by_name.log and "--weights seed" in by_name.log


SCRIPTED = TORCH.format(answer="scripted(x, self.scale)").replace(
    "class",
    """
@torch.jit.script
def scripted(x, scale):
    return F.leaky_relu(torch.sigmoid(x) * scale - 0.3, 0.1)

class""",
    1,
)
FUNCTION = TORCH.format(answer="Leaky.apply(x, self.scale)").replace(
    "class",
    """
import os
os.environ["TORCH_CUDA_ARCH_LIST"] = "9.0"

class Leaky(torch.autograd.Function):
    @staticmethod
    @torch.inference_mode()
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        return F.leaky_relu(torch.sigmoid(x) * scale - 0.3, 0.1)

class""",
    1,
)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(SCRIPTED, "attribute:torch.jit"), (FUNCTION, "import:os")],
    ids=["script", "function"],
)
def test_habits_of_published_files_are_judged_by_any_rules_and_named_by_others(
    answer: str, reason: str, judge: Judge, judge_with: Callable[..., Judge]
) -> None:
    verdict = judge_with(rules="any").verdict(corpus.TASK, {"model_new.py": answer})
    assert verdict.status == "correct", (verdict.reason, verdict.log)
    refused = judge.verdict(corpus.TASK, {"model_new.py": answer})
    assert refused.status == "forbidden" and refused.reason.startswith(reason), refused.reason


def test_a_guessed_seed_is_wrong_output(judge_with: Callable[..., Judge]) -> None:
    verdict = judge_with(rules="any", weights="seed").verdict(RANDOM_TASK, {"model_new.py": GUESSED})
    assert (verdict.status, verdict.reason) == ("wrong_output", "max_error:given"), verdict.log


@pytest.mark.parametrize(("error", "accepted"), [(5e-5, True), (1e-3, False)])
def test_kernelbench_tolerance_accepts_its_own_errors_only(
    error: float, accepted: bool, judge: Judge, judge_with: Callable[..., Judge]
) -> None:
    kernel = corpus.files("honest", "naive")["kernels/forward.cpp"]
    inexact = kernel.replace("0.1f * v;", f"0.1f * v;\n    y[i] += {error}f;")
    assert inexact != kernel
    files = {"model_new.py": corpus.MODEL_NEW, "kernels/forward.cpp": inexact}
    assert judge.verdict(corpus.TASK, files).status == "wrong_output"
    verdict = judge_with(tolerance="kernelbench").verdict(corpus.TASK, files)
    assert (verdict.status == "correct") == accepted, (verdict.status, verdict.reason, verdict.log)


QUANTISED = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127.0
        return torch.round(x {by}).clamp(-127, 127) * scale

def get_inputs():
    return [torch.randn(512, 768)]

def get_init_inputs():
    return []
"""
AUTOCAST = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.down(torch.relu(self.up(x)))
        return y.float()

def get_inputs():
    return [torch.randn(64, 256)]

def get_init_inputs():
    return [256]
"""


@pytest.mark.parametrize("code", [QUANTISED.format(by="/ scale"), AUTOCAST], ids=["quantised", "autocast"])
def test_a_task_in_low_precision_is_judged_by_its_own_output(
    code: str, judge_with: Callable[..., Judge]
) -> None:
    """By the label strict the same answer is right too, or a sentence says that float64 cannot decide."""
    task, files = KernelTask(code=code), {"model_new.py": code.replace("class Model(", "class ModelNew(")}
    verdict = judge_with(rules="any", tolerance="kernelbench").verdict(task, files)
    assert verdict.status == "correct", (verdict.reason, verdict.log)
    strict = judge_with(rules="any").verdict(task, files)
    assert strict.status in (["correct", "infrastructure"] if code != AUTOCAST else ["infrastructure"])
    remedy = "If it uses low precision on purpose, --tolerance kernelbench"
    assert strict.status == "correct" or (strict.reason == "task" and remedy in strict.log), strict


def test_a_value_that_is_rounded_the_other_way_is_named_as_one_of_few(
    judge_with: Callable[..., Judge],
) -> None:
    """An error of 1e-4 of a step moves one element in ten thousand by a whole step of the quantisation."""
    code = QUANTISED.format(by="/ scale + 1e-4").replace("class Model(", "class ModelNew(")
    task = KernelTask(code=QUANTISED.format(by="/ scale"))
    verdict = judge_with(rules="any", tolerance="kernelbench").verdict(task, {"model_new.py": code})
    # Eager itself may round an element otherwise than float64. Its largest error is a step too then, and the
    # candidate's is told by their root mean square.
    assert verdict.status == "wrong_output" and verdict.reason in ("max_error:given", "rms_error:given")
    found = re.search(r"(\d+) of 393216 elements differ .* more than 1\.0e-04, by (\S+) at most", verdict.log)
    assert found is not None and 1 <= int(found[1]) < 200 and float(found[2]) < 0.1, verdict.log


def test_after_timed_rounds_no_number_of_wrong_elements_is_told(
    judge_with: Callable[..., Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate that has seen timed inputs could encode them in the number."""
    # A round that is made again would have calls that the test does not count.
    monkeypatch.setattr(ResultMemory, "may_be_prepared", lambda *_: False)
    judge = copy.copy(judge_with(rules="any"))
    sandbox = judge.params.sandbox.model_copy(update={"most_rounds": judge.params.sandbox.rounds})
    judge.params = judge.params.model_copy(update={"sandbox": sandbox})
    task = KernelTask(code=f"# measured in {sandbox.rounds} rounds\n{corpus.CODE}")
    answer = (
        f"self.kept.update(calls=self.kept.get('calls', 0) + 1) or {HONEST} + (self.kept['calls'] > {{}})"
    )
    calls = judge.verdict(task, {"model_new.py": TORCH.format(answer=HONEST)}).evidence["sets_per_round"]
    before = sandbox.correctness_sets + (1 + sandbox.rounds) * calls
    for right, told in ((before, False), (0, True)):
        verdict = judge.verdict(task, {"model_new.py": TORCH.format(answer=answer.format(right))})
        assert verdict.status == "wrong_output" and "the output is wrong" in verdict.log, verdict.log
        assert ("elements differ" in verdict.log) == told, verdict.log
