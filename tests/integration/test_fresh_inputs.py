"""No two timed calls of a candidate get equal inputs, and inputs keep the structure of the task's own."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import judge_fixtures as corpus
import pytest
import torch
from input_properties import check_timed_inputs, timed_calls

from components.core.errors import TaskError
from components.core.params import Params
from components.core.task import KernelTask
from components.judge.input_mixing import InputBank, InputMix, fingerprint
from components.judge.input_structure import input_structures
from components.judge.judge import Judge
from components.judge.staged_inputs import StagedInputs
from components.sandbox.inside.input_distributions import INPUT_DISTRIBUTIONS

pytestmark = pytest.mark.usefixtures("no_compile_baseline")
Check = Callable[[torch.Tensor], bool]
N = 64


def is_sorted(x: torch.Tensor) -> bool:
    return bool((x.diff(dim=-1) >= 0).all())


def descends(x: torch.Tensor) -> bool:
    return is_sorted(-x)


def is_binary(x: torch.Tensor) -> bool:
    return bool(((x == 0) | (x == 1)).all())


def is_symmetric(x: torch.Tensor) -> bool:
    return torch.equal(x, x.mT)


def are_probabilities(x: torch.Tensor) -> bool:
    return bool((x >= 0).all() and ((x.float().sum(-1) - 1).abs() < 2e-2).all())


# Name of a structure: the expression that draws an input x, and whether x has the structure.
GENERATORS: dict[str, tuple[str, Check]] = {
    "sorted edges": ("torch.randn(4096).sort()[0]", is_sorted),
    "sorted rows": ("torch.rand(N, N).sort()[0]", is_sorted),
    "sorted columns": ("torch.rand(N, N).sort(0)[0]", lambda x: is_sorted(x.mT)),
    "descending": ("torch.randn(N, N).sort(descending=True)[0]", descends),
    "cumulative distribution": ("torch.rand(N, N).cumsum(-1) / N", is_sorted),
    "offsets": ("torch.randint(1, 9, (N,)).cumsum(0)", is_sorted),
    "zeros and ones": ("(torch.rand(N, N) < 0.7).float()", is_binary),
    "signs": ("torch.randint(0, 2, (N, N)).float() * 2 - 1", lambda x: bool((x.abs() == 1).all())),
    "booleans": ("torch.rand(N, N) > 0.5", is_binary),
    "one-hot rows": (
        "torch.eye(N)[torch.randint(0, N, (N,))]",
        lambda x: is_binary(x) and bool((x.sum(-1) == 1).all()),
    ),
    "class numbers": ("torch.randint(0, 10, (4096,))", lambda x: bool(((x >= 0) & (x < 10)).all())),
    "class numbers as floats": (
        "torch.randint(0, 1000, (4096,)).float()",
        lambda x: torch.equal(x, x.round()) and bool((x >= 0).all()),
    ),
    "permutation": ("torch.randperm(4096)", lambda x: torch.equal(x.sort()[0], torch.arange(4096))),
    "lower triangle": ("torch.randn(N, N).tril()", lambda x: torch.equal(x, x.tril())),
    "upper triangle": ("torch.randn(N, N).triu(1)", lambda x: torch.equal(x, x.triu(1))),
    "band": ("torch.randn(N, N).tril(3).triu(-3)", lambda x: torch.equal(x, x.tril(3).triu(-3))),
    "diagonal": ("torch.diag(torch.randn(N))", lambda x: torch.equal(x, torch.diag(x.diag()))),
    "blocks": (
        "torch.block_diag(torch.randn(32, 32), torch.randn(32, 32))",
        lambda x: not x[:32, 32:].any() and not x[32:, :32].any(),
    ),
    "symmetric": ("(lambda a: a + a.mT)(torch.randn(N, N))", is_symmetric),
    "positive definite": (
        "(lambda a: a @ a.mT + N * torch.eye(N))(torch.randn(N, N))",
        lambda x: is_symmetric(x) and bool(torch.linalg.cholesky_ex(x.double()).info == 0),
    ),
    "batch of symmetric": ("(lambda a: a + a.mT)(torch.randn(3, N, N))", is_symmetric),
    "padded rows": (
        "torch.randn(N, N) * (torch.arange(N) < 40)",
        lambda x: not x[:, 40:].any(),
    ),
    "additive causal mask": (
        "torch.randn(N, N).masked_fill(torch.ones(N, N).triu(1).bool(), float('-inf'))",
        lambda x: bool((x.isneginf() == torch.ones(N, N).triu(1).bool()).all() and not x.isnan().any()),
    ),
    "random additive mask": (
        "torch.zeros(N, N).masked_fill(torch.rand(N, N) < 0.3, float('-inf'))",
        lambda x: bool(((x == 0) | x.isneginf()).all()),
    ),
    "probabilities": ("torch.randn(N, N).softmax(-1)", are_probabilities),
    "probabilities in half": ("torch.randn(N, N).softmax(-1).half()", are_probabilities),
    "log-probabilities": (
        "torch.randn(N, N).log_softmax(-1)",
        lambda x: bool((x.logsumexp(-1).abs() < 1e-3).all()),
    ),
    "unit vectors": (
        "F.normalize(torch.randn(N, N), dim=-1)",
        lambda x: bool(((x.norm(dim=-1) - 1).abs() < 1e-3).all()),
    ),
    "rows that repeat": ("torch.randn(1, N).expand(N, N)", lambda x: bool((x == x[:1]).all())),
    "few levels": ("torch.randint(-8, 8, (N, N)) * 0.25", lambda x: torch.equal(x * 4, (x * 4).round())),
    "complex": ("torch.randn(N, N, dtype=torch.complex64)", lambda x: x.is_complex()),
}
TASK = """
import torch, torch.nn as nn, torch.nn.functional as F
N = 64
class Model(nn.Module):
    def forward(self, {names}):
        return torch.stack([{sums}])
def get_inputs():
    return [{inputs}]
def get_init_inputs():
    return []
"""


def drawn(expression: str) -> torch.Tensor:
    value: torch.Tensor = eval(expression, {"torch": torch, "F": torch.nn.functional, "N": N})
    return value.contiguous()


@pytest.mark.parametrize("name", GENERATORS)
def test_a_structure_is_found_and_kept_by_the_input_distributions(name: str) -> None:
    expression, holds = GENERATORS[name]
    sets = [[drawn(expression)] for _ in range(7)]
    assert all(holds(tensor) for (tensor,) in sets)
    assert input_structures(sets, "cpu")[0]
    bank = InputBank(sets, ["given"], "cpu")
    assert bank.draws
    for distribution in bank.usable():
        changed = INPUT_DISTRIBUTIONS[distribution](sets[0][0])
        # On a matrix that is no longer positive definite the task fails, which is noticed there.
        assert holds(changed) or (name, distribution) == ("positive definite", "flipped"), distribution


@pytest.mark.parametrize(
    "expression",
    [
        "torch.randn(256, 1024)",
        "torch.rand(4096)",
        "torch.randn(8, 3, 32, 32).half()",
        "torch.rand(512, 512).bfloat16()",
        "torch.randn(2, 2)",
        "torch.rand(N, N, dtype=torch.float64) * 100 - 50",
        "torch.randn(1)",
    ],
)
def test_plain_random_numbers_have_no_structure(expression: str) -> None:
    for _ in range(5):
        assert input_structures([[drawn(expression)] for _ in range(6)], "cpu") == [frozenset()]


def test_an_input_that_follows_from_another_is_related_to_it() -> None:
    sets = [[x, x + 0.1 * torch.randn(N, N), torch.randn(N, N)] for x in torch.randn(4, N, N)]
    assert input_structures(sets, "cpu") == [frozenset({"related"})] * 2 + [frozenset()]


def test_timed_inputs_of_structured_tasks_are_different_and_keep_their_structure(judge: Judge) -> None:
    """All generators are inputs of one task, whose timed calls are looked at as the runners get them."""
    names = [f"x{number}" for number in range(len(GENERATORS))]
    code = TASK.format(
        names=", ".join(names),
        sums=", ".join(f"torch.nan_to_num(torch.view_as_real({n} + 0j)).float().sum()" for n in names),
        inputs=", ".join(expression for expression, _ in GENERATORS.values()),
    )
    with judge.bench(KernelTask(code=code)) as bench:
        assert bench.reference.inputs.draws
        for mix, tensors in timed_calls(bench.reference, rounds=12):
            for (name, (_, holds)), tensor in zip(GENERATORS.items(), tensors, strict=True):
                assert holds(tensor) or mix.distribution != "given", name
        check_timed_inputs(bench.reference, rounds=12)


@pytest.mark.parametrize(
    ("names", "sums", "inputs"),
    [
        ("x", "x.sum(), x.mean()", "torch.manual_seed(0) and torch.randn(N, N).tril()"),
        ("", "torch.ones(()), torch.zeros(())", ""),
    ],
    ids=["fixed", "none"],
)
def test_a_task_whose_inputs_never_change_is_refused(
    judge: Judge, names: str, sums: str, inputs: str
) -> None:
    verdict = judge.verdict(
        KernelTask(code=TASK.format(names=names, sums=sums, inputs=inputs)), corpus.files("honest", "simd")
    )
    assert (verdict.status, verdict.reason) == ("infrastructure", "task")
    assert "no tensor that differs between two seeds" in verdict.log


def test_inputs_that_run_out_are_not_repeated(judge: Judge) -> None:
    code = TASK.format(names="x", sums="x.sum(), x.min()", inputs="torch.randint(0, 2, (8,))")
    with (
        pytest.raises(TaskError, match=r"equal inputs 8 times in a row|differs between two seeds"),
        judge.bench(KernelTask(code=code)) as bench,
    ):
        staged = StagedInputs(bench.reference, bench.reference.layout.calls)
        for number in range(500):
            staged.hold_fresh(bench.reference.layout.calls, number)


def test_a_verdict_by_kernelbenchs_tolerances_names_a_trivial_answer(
    ci_params: Params, tmp_path: Path
) -> None:
    """All probabilities of a long row are below the absolute tolerance, so zeros are close to them."""
    sandbox = ci_params.sandbox.model_copy(update={"tolerance": "kernelbench"})
    params = ci_params.model_copy(update={"sandbox": sandbox})
    code = corpus.changed_code("torch.softmax(0.1 * x * self.scale, -1)", "[torch.randn(8, 32768)]").replace(
        "torch.ones(1024)", "torch.ones(32768)"
    )
    with contextlib.closing(Judge(params, tmp_path)) as judge, judge.bench(KernelTask(code=code)) as bench:
        assert bench.trivial_answer == "zeros_pass"
    with contextlib.closing(Judge(params, tmp_path)) as judge, judge.bench(corpus.TASK) as bench:
        assert bench.trivial_answer == ""


def test_a_fingerprint_depends_on_the_order_and_on_every_word() -> None:
    words = torch.arange(1 << 12)
    others = [words.flip(0), words.roll(1), words.index_fill(0, torch.tensor([4095]), 7)]
    found = {fingerprint(one.view(torch.uint8)) for one in (words, *others)}
    assert len(found) == 4 and fingerprint(words.view(torch.uint8)) in found


def test_a_drawn_call_is_drawn_again_from_its_seed(judge: Judge) -> None:
    """Calls that are compared later are described by their seed alone."""
    code = TASK.format(names="x", sums="x.sum(), x.mean()", inputs="torch.randn(N, N).tril()")
    with judge.bench(KernelTask(code=code)) as bench:
        first, again = torch.empty(2, N * N)
        for view in (first, again):
            bench.reference.write_inputs(InputMix(seed=5, distribution="scaled"), [view])
            bench.reference.write_inputs(InputMix(seed=6), [torch.empty(N * N)])
        assert torch.equal(first, again)
