"""The mined operator table, its reasons for what is left out, and the chains composed from it."""

import ast
import itertools
from pathlib import Path

import pytest
import torch
from input_properties import check_timed_inputs
from synthesis_fixtures import InProcess, parameters

from components.core.errors import TaskError
from components.core.params import Params
from components.core.progress import Quiet
from components.core.task import KernelTask, check_contract
from components.judge.judge import Judge
from components.synthesis import mine_torch
from components.synthesis.dataset import build_dataset
from components.synthesis.mined_operators import SMALL, OperatorTable, output_layout, write_module_source
from components.synthesis.task_filter import TaskFilter
from components.synthesis.torch_composer import TorchComposer


def mined_parameters(*sets: str) -> Params:
    return parameters(
        "data.operators=all",
        "data.transformers_share=0.05",
        "data.numel=[16384, 131072]",
        "data.eager_seconds=[1e-6, 10]",
        *sets,
    )


def test_the_table_is_as_large_as_it_says(table: OperatorTable) -> None:
    assert len({template.operator for template in table.templates}) >= 150 and len(table.modules) >= 60
    several = {
        name: sum(len(form.ranks) for form in table.templates if form.name == name)
        for name in {form.name for form in table.templates}
    }
    assert sum(count >= 2 for count in several.values()) >= 150, "several argument and shape variants"
    for role in ("Norm", "MLP", "Attention", "Router", "rotary", "Activation"):
        assert any(role in module.name for module in table.modules), role


def test_every_public_name_is_mined_or_left_out_with_a_reason(table: OperatorTable) -> None:
    mined_names = {form.name for form in table.templates}
    left_out = table.left_out
    assert not mined_names & set(left_out) and all(left_out.values())
    assert {name for name, _ in mine_torch._public()} == mined_names | {
        name for name in left_out if not name.startswith("transformers.")
    }
    assert (
        left_out["nn.Dropout"] == "gives its input back when not training"
        and left_out["torch.rand_like"] == "draws random numbers"
    )


def test_forms_fit_on_meta_tensors(table: OperatorTable) -> None:
    for form in table.templates[::10]:
        for rank in form.ranks:
            assert (
                output_layout(form, SMALL[rank], torch.empty(SMALL[rank], device="meta").stride()) is not None
            ), form


def test_modules_are_self_contained(table: OperatorTable) -> None:
    for module in table.modules[::7]:
        code = write_module_source(module, batch=2, length=8, hidden=256)
        roots = {
            alias.name
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        roots |= {str(node.module) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)}
        assert not any(root.startswith("transformers") for root in roots), module.name


def test_equal_seeds_compose_equal_chains(table: OperatorTable) -> None:
    one, two, other = (
        [
            task.task_id
            for task in itertools.islice(
                TorchComposer(table, mined_parameters(f"data.seed={seed}").data, "cpu", modules=True), 8
            )
        ]
        for seed in (7, 7, 8)
    )
    assert one == two != other


def test_composed_chains_keep_the_contract_the_rubric_and_run(table: OperatorTable) -> None:
    data = mined_parameters().data
    task_filter = TaskFilter(data)
    for task in itertools.islice(TorchComposer(table, data, "cpu", modules=True), 30):
        check_contract(task.code, "composed")
        assert task_filter.check_source(task) == ("", ""), task.code
        namespace: dict = {"__name__": "task"}
        exec(task.code, namespace)
        with torch.no_grad():
            inputs = namespace["get_inputs"]()
            out = namespace["Model"]().eval()(*inputs)
        # An image's side is the root of a length, rounded down.
        low = data.numel[0] // 2 if task.data_source == "transformers" else data.numel[0]
        assert out.dtype == torch.float32 and low <= inputs[0].numel() <= data.numel[1]


def test_most_chains_find_their_size_on_a_gpu(table: OperatorTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch time does not grow with the size; a guess that grows finds a size for few chains."""
    data = mined_parameters("data.eager_seconds=[0.0001, 0.05]", "data.numel=[1048576, 67108864]").data
    composer, sized = TorchComposer(table, data, "cuda", modules=False), []
    likely = composer._likely
    monkeypatch.setattr(composer, "_likely", lambda chain, rank: sized.append(chain) or likely(chain, rank))
    tasks = [composer.compose() for _ in range(40)]
    assert len(sized) < 1.5 * len(tasks)


def test_a_data_set_of_mined_operators_has_exactly_the_mix(
    table: OperatorTable, seeds: Path, tmp_path: Path
) -> None:
    params = mined_parameters(
        "data.tasks=20",
        "data.held_out=5",
        "data.operator_mix={1: 0.2, 2: 0.6, 3: 0.2}",
        "data.transformers_share=0.2",
    )
    summary = build_dataset(params, tmp_path / "tasks", InProcess(), Quiet(), seeds)
    kinds = [task.data_source for task in summary.admitted if task.split == "train"]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "torch#1": 3,
        "torch#2": 10,
        "torch#3": 3,
        "transformers": 4,
    }
    assert (
        summary.version
        == build_dataset(params, tmp_path / "again", InProcess(shuffled=True), Quiet(), seeds).version
    )


def test_timed_inputs_of_all_operators_are_different_and_have_their_structures(
    table: OperatorTable, judge: Judge
) -> None:
    """A task of every module, since these have inputs of several kinds, and chains of all operators."""
    modules = [
        KernelTask(code=write_module_source(module, batch=2, length=64, hidden=256))
        for module in table.modules
    ]
    composer, chains = TorchComposer(table, mined_parameters().data, "cpu", modules=False), list[KernelTask]()
    missing = {template.name for template in table.templates}
    for task in itertools.islice(composer, 400):
        if not missing.isdisjoint(task.ops):
            missing.difference_update(task.ops)
            chains.append(task)
    judged = 0
    for task in [*modules, *chains]:
        try:
            with judge.bench(task) as bench:
                check_timed_inputs(bench.reference, rounds=3)
        except TaskError:  # admission refuses it
            continue
        judged += 1
    assert judged >= 0.9 * len(modules + chains)
