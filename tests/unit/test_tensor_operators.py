"""The table of tensor operators: each row is read back from the source that the composer writes."""

import itertools
import random
import re
from collections import Counter
from math import prod
from pathlib import Path

import pytest
from synthesis_fixtures import InProcess, parameters

from components.bootstrap.canonicalize import canonicalize
from components.bootstrap.demonstrations import draw_kernel, make_demonstration, mutate
from components.bootstrap.loop_nest import Axis, Code, Loop, Nest, merge, over_dims
from components.bootstrap.nest_layout import without_windows
from components.bootstrap.nest_writer import draw_nest_schedule, write_program
from components.bootstrap.tensor_operators import OPERATORS, read_program
from components.core.config import resolve
from components.core.errors import UserError
from components.core.progress import Quiet
from components.synthesis.contamination import count_subtrees, similarity
from components.synthesis.core_composer import compose_tasks
from components.synthesis.dataset import build_dataset
from components.synthesis.task_filter import find_label_error
from components.synthesis.tensor_composer import Choice, estimate_seconds, fill, write_tensor_source

PARAMS = resolve("smoke", ("data.operators=kernelbench",)).params
# An integer of at least three digits.
INTEGER = re.compile(r"(?<![\w.])\d{3,}(?![\w.])")
SHAPES = ((64,), (24, 24), (3, 8, 20), (2, 8, 9, 11), (2, 4, 6, 7, 9), (20, 1, 8))


def source_of(*names: str, shape: tuple[int, ...], seed: int = 0) -> str | None:
    """The source of a chain on an input of this shape, or None if the chain does not fit it."""
    filled = fill([Choice(name, seed + index) for index, name in enumerate(names)], shape)
    return None if filled is None else write_tensor_source(*filled)


def drawn(*names: str, shape: tuple[int, ...]) -> str:
    """The source of a chain, with the first seed for which it fits an input of this shape."""
    return next(code for seed in range(100) if (code := source_of(*names, shape=shape, seed=seed)))


def program_of(*names: str, shape: tuple[int, ...]):
    program = read_program(drawn(*names, shape=shape))
    assert program is not None
    return program


@pytest.mark.parametrize("name", [name for name, row in OPERATORS.items() if row.draw is not None])
def test_a_composed_operator_is_read_back(name: str) -> None:
    sources = [
        code
        for shape, seed in itertools.product(SHAPES, range(4))
        if (code := source_of(name, shape=shape, seed=seed))
    ]
    assert sources
    for code in sources:
        space: dict = {}
        exec(code, space)
        model = space["Model"]()
        program = read_program(code)
        assert program is not None
        inputs = space["get_inputs"]()
        expected = ["p_" + entry.replace(".", "_") for entry in model.state_dict()]
        assert program.tensors[len(inputs) : -1] == tuple(expected)
        shape = program.shape
        for part in program.parts:
            shape = part.shape if isinstance(part, Nest) else shape
        assert shape == model(*inputs).shape


def test_sources_of_other_operators_have_no_program() -> None:
    code = source_of("softmax", shape=(8, 16))
    assert code is not None and read_program(code) is not None
    assert read_program(code.replace("torch.softmax", "torch.fft.fft")) is None
    assert read_program(code.replace("return x", "return x - x")) is None
    assert read_program(code.replace("torch.randn(8, 16)", "[torch.randn(8, 16)]")) is None
    assert read_program("print(") is None


def test_neighbouring_axes_are_joined_only_where_all_tensors_move_evenly() -> None:
    nest = over_dims((2, 3, 5, 7), (2, 3), Code((Loop((("sum", "total", "v"),)),), "total"))
    assert [(axis.size, axis.reduced) for axis in merge(nest).axes] == [(6, False), (35, True)]
    transposed = Nest(
        (Axis("i", 3, False, {"a": 1, "o": 5}), Axis("j", 5, False, {"a": 3, "o": 1})), nest.code, (3, 5)
    )
    assert len(merge(transposed).axes) == 2


def test_elementwise_operators_share_the_kernel_of_their_neighbour() -> None:
    program = program_of("relu", "softmax", "mul_constant", shape=(8, 64))
    rng = random.Random(1)
    texts = {}
    while len(texts) < 2:
        schedule = draw_nest_schedule(rng, "cpu")
        texts[schedule.fusion] = write_program(program, schedule)
    assert texts["all"].count("float* o =") == 1 and texts["none"].count("float* o =") == 3


def test_a_convolution_on_a_padded_copy_has_no_windows() -> None:
    program = program_of("conv_transpose_2", shape=(2, 8, 9, 11))
    (nest,) = (part for part in program.parts[:1] if isinstance(part, Nest))
    copy, product = without_windows(nest)
    assert copy.windows and not product.windows and product.operands


def test_composed_tasks_are_labelled_readable_and_within_the_window() -> None:
    tasks = list(itertools.islice(compose_tasks(3, PARAMS.data), 40))
    low, high = PARAMS.data.eager_seconds
    for task in tasks:
        assert not find_label_error(task.ops, task.data_source, task.code)
        assert read_program(task.code) is not None
        assert low <= estimate_seconds(task.code, "cpu") <= high
    assert tasks == list(itertools.islice(compose_tasks(3, PARAMS.data), 40))
    assert len({name for task in tasks for name in task.ops}) > 30
    firsts = Counter(
        task.ops[0].partition("_")[0] for task in itertools.islice(compose_tasks(4, PARAMS.data), 200)
    )
    assert 70 < firsts["conv"] < 120 and 15 < firsts["matmul"] + firsts["linear"] < 55
    wrong = tasks[0].model_copy(update={"ops": ("conv_2", *tasks[0].ops[1:])})
    assert find_label_error(wrong.ops, wrong.data_source, wrong.code) == "conv_2 is not in the source"


def test_some_chains_use_a_result_again_later() -> None:
    wide = resolve("smoke", ("data.operators=kernelbench", "data.operator_mix={5: 1.0}")).params.data
    found = 0
    for task in itertools.islice(compose_tasks(2, wide), 40):
        used = {"add_kept", "mul_kept"}.intersection(task.ops)
        assert len(used) == task.ops.count("keep") <= 1
        found += len(used)
        form, program = canonicalize(task.code), read_program(task.code)
        assert form is not None and program is not None and canonicalize(form) == form
        assert ("identity = x" in task.code) == bool(used)
        exec(task.code, space := {})
        space["Model"](*space["get_init_inputs"]())(*space["get_inputs"]())
    assert found > 2


def test_inputs_lie_within_numel_unless_they_are_vectors_and_a_window_without_shapes_is_refused() -> None:
    for task in itertools.islice(compose_tasks(3, PARAMS.data), 40):
        program = read_program(task.code)
        assert program is not None
        low, high = PARAMS.data.numel
        assert len(program.shape) == 1 or low <= prod(program.shape) <= high
    for numel in ("[10, 20]", "[17179869184, 34359738368]"):
        with pytest.raises(UserError, match=r"^data\.numel: no shape of rank 2 or more has between"):
            next(compose_tasks(0, parameters("data.operators=kernelbench", f"data.numel={numel}").data))


def test_a_data_set_of_them_needs_no_mined_table(tmp_path: Path) -> None:
    params = parameters("data.operators=kernelbench", "data.eager_seconds=[1e-7, 10]")
    summary = build_dataset(params, tmp_path / "tasks", InProcess(), Quiet())
    assert len(summary.admitted) == params.data.tasks + params.data.held_out
    assert all(read_program(task.code) is not None for task in summary.admitted)


def test_a_longer_chain_differs_from_a_program_of_one_operator() -> None:
    alone, chain = (
        drawn(*names, shape=(2, 8, 9, 11)) for names in (("conv_2",), ("conv_2", "mish", "instance_norm_2"))
    )
    assert similarity(count_subtrees(alone), count_subtrees(chain)) < PARAMS.data.max_similarity


def test_demonstrations_are_written_for_composed_tasks_of_both_kinds() -> None:
    rng = random.Random(0)
    tasks = [*itertools.islice(compose_tasks(5, PARAMS.data), 20)]
    for task, device in itertools.product(tasks, ("cpu", "cuda")):
        messages = make_demonstration(task, rng, PARAMS.coldstart, device)
        assert any("KERNEL(forward)" in message["content"] for message in messages)
    other = tasks[0].code.replace("get_inputs", "make_inputs")
    with pytest.raises(ValueError, match="chains of the tensor operators only"):
        make_demonstration(tasks[0].model_copy(update={"code": other}), rng, PARAMS.coldstart, "cpu")


def test_kernels_have_no_number_that_a_policy_would_have_to_calculate() -> None:
    rng = random.Random(1)
    blocks = {str(size + more) for size in (128, 256, 512) for more in (0, -1)}
    for task, device in itertools.product(
        itertools.islice(compose_tasks(8, PARAMS.data), 30), ("cpu", "cuda")
    ):
        integers = INTEGER.findall(draw_kernel(task.code, device, rng))
        assert {*integers} <= {*INTEGER.findall(task.code), *blocks}


def test_a_kernel_of_each_operator_alone_can_be_made_wrong() -> None:
    rng = random.Random(6)
    singles = {
        name: next(
            (
                code
                for shape in SHAPES
                for seed in range(30)
                if (code := source_of(name, shape=shape, seed=seed))
            ),
            None,
        )
        for name, row in OPERATORS.items()
        if row.draw is not None
    }
    assert None not in singles.values()
    for code, device in itertools.product(singles.values(), ("cpu", "cuda")):
        for _ in range(4):
            kernel = draw_kernel(str(code), device, rng)
            assert mutate(kernel, rng) != kernel
