"""Composed tasks with operators along dimension 0, scans, pools and transpositions."""

import itertools
from pathlib import Path

from synthesis_fixtures import Borrowed

from components.bootstrap.chain_parser import OPERATOR_LINES, STRIDED_OPERATORS, read_chain
from components.core.config import resolve
from components.core.progress import Quiet
from components.judge.judge import Judge
from components.synthesis.compose import compose_tasks, composed_task, every_operator_matters, write_source
from components.synthesis.core_operators import BY_NAME
from components.synthesis.dataset import admit_tasks


def test_operators_that_change_the_shape_matter() -> None:
    assert every_operator_matters((("silu", ()), ("transpose", ())))
    assert every_operator_matters((("square", ()), ("max_pool", ("4",)), ("erf", ())))
    assert every_operator_matters((("sum_dim0", ()), ("tanhshrink", ())))


def test_chains_whose_output_hardly_varies_are_not_composed() -> None:
    assert not every_operator_matters((("softmax_dim0", ()), ("sum_dim0", ()))), "always one"
    assert not every_operator_matters((("add_constant", ("0.5",)), ("softmax_dim0", ())))
    shifted = (("normalize_dim0", ()), ("mul_constant", ("0.01",)), ("add_constant", ("5.0",)))
    assert not every_operator_matters(shifted)


def test_a_third_of_the_tasks_has_one_strided_operator_among_elementwise_ones() -> None:
    data = resolve("smoke").params.data
    tasks = list(itertools.islice(compose_tasks(5, data), 300))
    strided = [task for task in tasks if STRIDED_OPERATORS & set(task.ops)]
    assert abs(len(strided) / len(tasks) - 0.35) < 0.08
    for task in strided:
        kinds = [BY_NAME[name].kind for name in task.ops]
        assert kinds.count("strided") == 1 and kinds.count("elementwise") == len(kinds) - 1
    assert {name for task in strided for name in task.ops} >= STRIDED_OPERATORS
    assert len({len(task.ops) for task in strided}) >= 4, "chains of any length"


def test_tasks_for_cuda_have_no_strided_operator() -> None:
    data = resolve("smoke", ("device=cuda",)).params.data
    for task in itertools.islice(compose_tasks(5, data, "cuda"), 60):
        assert not STRIDED_OPERATORS & set(task.ops)


def test_every_strided_operator_is_read_back_and_gives_the_shape_that_is_estimated() -> None:
    assert {name for name, operator in BY_NAME.items() if operator.kind == "strided"} == STRIDED_OPERATORS
    assert OPERATOR_LINES.keys() == BY_NAME.keys()
    for name in sorted(STRIDED_OPERATORS):
        operator = BY_NAME[name]
        for constants in itertools.product(*operator.constants):
            code = write_source(((name, constants), ("gelu", ())), 64, 256)
            chain = read_chain(code)
            assert chain is not None and chain.by_row and chain.steps[0].constants == constants
            namespace: dict = {}
            exec(code, namespace)
            out = namespace["Model"]()(*namespace["get_inputs"]())
            if operator.output_share == 0:
                assert out.shape == (1, 256)
            elif constants:
                assert out.shape == (64, 256 // int(constants[0]))
            else:
                assert out.numel() == 64 * 256
    assert read_chain(code.replace("x.t()", "F.max_pool1d(x, 2.0)")) is None


def test_the_judge_admits_a_task_with_each_strided_operator(judge: Judge, tmp_path: Path) -> None:
    params = resolve("smoke", ("data.eager_seconds=[1e-7, 10]",)).params
    chains = [
        (
            *((("tanh", ()),) if BY_NAME[name].output_share == 0 else ()),
            (name, tuple(palette[1] for palette in BY_NAME[name].constants)),
            ("silu", ()),
        )
        for name in sorted(STRIDED_OPERATORS)
    ]
    tasks = [
        composed_task(write_source(steps, 128, 1024), tuple(name for name, _ in steps), 0) for steps in chains
    ]
    pool = Borrowed(judge, params, tmp_path / "verdicts")
    try:
        summary = admit_tasks(params, tasks, len(tasks), tmp_path / "out", pool, Quiet())
    finally:
        pool.close()
    assert not summary.rejected and len(summary.admitted) == len(STRIDED_OPERATORS)
