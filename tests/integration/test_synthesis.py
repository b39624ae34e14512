"""The data set: tasks are sound and reproducible, the held-out split is clean, the funnel adds up."""

import csv
import itertools
import json
import random
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from synthesis_fixtures import InProcess, parameters

from components.bootstrap.operator_chain import read_chain
from components.core.config import resolve
from components.core.errors import InfrastructureError, UserError
from components.core.progress import Quiet
from components.core.task import check_contract, dataset_version, dtype_of, in_dtype, read_tasks
from components.judge.verdict import Admission
from components.synthesis.contamination import EvaluationPrograms, count_subtrees, graph_digest, similarity
from components.synthesis.core_composer import (
    compose_task,
    compose_tasks,
    compose_training_tasks,
    every_operator_matters,
    write_source,
)
from components.synthesis.dataset import build_dataset
from components.synthesis.operator_ablation import split_of


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_equal_seeds_compose_equal_tasks(device: str) -> None:
    data = parameters().data
    one, two, other = (
        [task.task_id for task in itertools.islice(compose_tasks(seed, data, device), 20)]
        for seed in (7, 7, 8)
    )
    assert one == two != other


def test_composed_tasks_keep_the_contract_and_run() -> None:
    data = parameters().data
    for task in itertools.islice(compose_tasks(1, data), 60):
        check_contract(task.code, "composed")
        namespace: dict = {}
        exec(task.code, namespace)
        inputs = namespace["get_inputs"]()
        out = namespace["Model"](*namespace["get_init_inputs"]())(*inputs)
        low, high = data.numel
        assert low <= inputs[0].numel() <= high
        assert out.dtype == torch.float32 and out.dim() == 2 and torch.isfinite(out).all()
        assert out.shape[0] == inputs[0].shape[0]
        assert task.data_source == f"torch#{len(task.ops)}"


def test_operator_counts_follow_the_mix() -> None:
    data = parameters("data.operator_mix={1: 0.1, 2: 0.5, 3: 0.4}").data
    counts = [len(task.ops) for task in itertools.islice(compose_tasks(2, data), 400)]
    assert (
        abs(counts.count(1) / 400 - 0.1) < 0.06
        and abs(counts.count(2) / 400 - 0.5) < 0.09
        and max(counts) == 3
    )


def test_a_share_of_the_tasks_is_in_half_precision(tmp_path: Path) -> None:
    params = parameters("data.half_share=0.3", "data.tasks=20", "data.held_out=10")
    summary = build_dataset(params, tmp_path / "tasks", InProcess(), Quiet())
    dtypes = Counter((task.split, dtype_of(task.code)) for task in summary.admitted)
    assert [dtypes["train", dtype] for dtype in ("float32", "float16", "bfloat16")] == [14, 3, 3]
    assert dtypes["held_out", "float32"] == 7 and dtypes.total() == 30
    for task in summary.admitted:
        chain = read_chain(task.code)
        assert chain is not None and chain.dtype == dtype_of(task.code)
        namespace: dict[str, Any] = {}
        exec(task.code, namespace)
        model, inputs = namespace["Model"](), namespace["get_inputs"]()
        tensors = [*inputs, *model.state_dict().values(), model(*inputs)]
        assert {tensor.dtype for tensor in tensors} == {getattr(torch, chain.dtype)}


def test_a_window_without_shapes_is_refused() -> None:
    with pytest.raises(UserError, match="numel"):
        compose_task(random.Random(0), parameters("data.numel=[10, 20]").data)


def test_held_out_sequences_depend_on_the_seed_and_are_about_a_fifth() -> None:
    data = parameters().data
    sequences = {task.ops for task in itertools.islice(compose_tasks(3, data), 600)}
    held_out = [split_of(ops, 0) == "held_out" for ops in sequences]
    assert 0.1 < sum(held_out) / len(sequences) < 0.3
    assert {split_of(ops, 0) for ops in sequences if split_of(ops, 1) == "held_out"} == {"train", "held_out"}
    for task in itertools.islice(compose_tasks(4, data), 100):
        assert task.split == split_of(task.ops, data.seed)


def test_every_operator_of_a_composed_chain_matters() -> None:
    assert not every_operator_matters((("softmax", ()), ("sum", ()))), "always one"
    assert not every_operator_matters((("square", ()), ("relu", ()))), "relu has nothing to do"
    assert not every_operator_matters((("add_constant", ("0.5",)), ("softmax", ()))), (
        "softmax does not see a shift"
    )
    assert not every_operator_matters((("sum", ()), ("tanh", ()), ("tanh", ()), ("tanh", ()))), "saturated"
    assert every_operator_matters((("gelu", ()), ("mul_constant", ("0.5",))))


# --- contamination --------------------------------------------------------------------------------

EVALUATION_PROGRAM = '''import torch
import torch.nn as nn

class Model(nn.Module):
    """Simple model that performs a GELU activation and a softmax."""
    def __init__(self):
        super(Model, self).__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Args: x of any shape."""
        activated = torch.nn.functional.gelu(x)
        return torch.softmax(activated, dim=1)

def get_inputs():
    return [torch.randn(16, 16384)]

def get_init_inputs():
    return []
'''


def test_the_same_program_in_other_words_is_similar() -> None:
    ours = write_source((("gelu", ()), ("softmax", ())), (64, 256))
    half = in_dtype(ours, "bfloat16")
    for code in (ours, half):
        assert similarity(count_subtrees(code), count_subtrees(EVALUATION_PROGRAM)) == 1.0
    assert len({graph_digest(code) for code in (ours, half, in_dtype(ours, "float16"))}) == 3


def test_other_operators_or_orders_are_not_similar() -> None:
    program = count_subtrees(EVALUATION_PROGRAM)
    for steps in (
        (("softmax", ()), ("gelu", ())),
        (("silu", ()), ("softmax", ())),
        (("gelu", ()),),
        (("gelu", ()), ("softmax", ()), ("tanh", ())),
    ):
        assert 0 < similarity(program, count_subtrees(write_source(steps, (64, 256)))) <= 0.9


def test_graphs_differ_in_constants_and_shapes_only_when_they_do() -> None:
    code = write_source((("leaky_relu", ("0.1",)),), (64, 256))
    assert graph_digest(code) == graph_digest(
        code.replace(
            "x = F.leaky_relu(x, 0.1)\n        return x", "return torch.nn.functional.leaky_relu(x, 0.1)"
        )
    )
    assert graph_digest(code) != graph_digest(code.replace("0.1", "0.2"))
    assert graph_digest(code) != graph_digest(code.replace("64", "128"))
    named = code.replace("torch.randn(64, 256)", "torch.randn(rows, 256)")
    assert graph_digest(f"rows = 64\n{named}") != graph_digest(f"rows = 128\n{named}")


TWO_INPUTS = """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()
        self.norm = nn.LayerNorm(64)
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, first, second):
        out = {value}
        {last}
        return out
"""


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        ("self.act(self.norm(first))", "self.norm(self.act(first))", False),
        ("self.a(self.a(first))", "self.a(self.b(first))", False),
        ("self.a(self.b(first))", "self.b(self.a(first))", True),
        ("torch.relu(first) - first", "torch.relu(first) - second", False),
        ("torch.relu(first) / second", "torch.relu(second) / first", False),
    ],
)
def test_graphs_differ_in_which_inputs_and_modules_they_use(one: str, other: str, is_equal: bool) -> None:
    digests = [graph_digest(TWO_INPUTS.format(value=value, last="x = out")) for value in (one, other)]
    assert (digests[0] == digests[1]) is is_equal
    renamed = TWO_INPUTS.replace("first", "p").replace("second", "q").replace("self.act", "self.relu")
    one = one.replace("first", "p").replace("second", "q").replace("self.act", "self.relu")
    assert graph_digest(renamed.format(value=one, last="x = out")) == digests[0]


def test_an_assignment_in_place_is_one_of_a_new_value() -> None:
    plain, in_place, other = (
        TWO_INPUTS.format(value=value, last=last)
        for value, last in (
            ("torch.relu(torch.softmax(first, 1))", "out = out + second"),
            ("torch.relu(torch.softmax(first, 1))", "out += second"),
            ("torch.cumsum(torch.tanh(first), 0)", "out += second"),
        )
    )
    assert graph_digest(plain) == graph_digest(in_place) != graph_digest(other)
    assert similarity(count_subtrees(plain), count_subtrees(in_place)) == 1.0
    assert similarity(count_subtrees(in_place), count_subtrees(other)) < 0.9


def test_self_substitution_stays_small() -> None:
    lines = "\n".join("        x = x * x" for _ in range(40))
    assert (
        count_subtrees(f"class Model:\n    def forward(self, x):\n{lines}\n        return x\n").total()
        < 1_000_000
    )


def test_no_task_to_learn_from_is_an_evaluation_program(tmp_path: Path) -> None:
    sets = ("data.operators=kernelbench", "data.half_share=0", "data.against=[]")
    data = resolve("h20-pool", sets).params.data
    made = list(itertools.islice(compose_training_tasks(1, data, "cuda"), 12))
    (tmp_path / "1_Program.py").write_text(made[4].code)
    programs = EvaluationPrograms([str(tmp_path)])
    data = data.model_copy(update={"against": [str(tmp_path)]})
    left = list(itertools.islice(compose_training_tasks(1, data, "cuda"), 11))
    assert left == [task for task in made if programs.nearest(task.code)[0] <= data.max_similarity]


def test_evaluation_programs_come_from_folders_and_parquet(tmp_path: Path) -> None:
    (tmp_path / "level1").mkdir()
    (tmp_path / "level1" / "88_Gelu_Softmax.py").write_text(EVALUATION_PROGRAM)
    (tmp_path / "level1" / "notes.py").write_text("print('no model here')")
    pyarrow.parquet.write_table(pyarrow.table({"code": [EVALUATION_PROGRAM]}), tmp_path / "suite.parquet")
    ours = write_source((("gelu", ()), ("softmax", ())), (64, 256))
    for against in (tmp_path / "level1", tmp_path / "suite.parquet"):
        value, origin = EvaluationPrograms([str(against)]).nearest(ours)
        assert value == 1.0 and origin in ("level1/88_Gelu_Softmax.py", "suite.parquet:0")
    with pytest.raises(UserError, match=r"data\.against"):
        EvaluationPrograms([str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match=r"git clone https://github.com/ScalingIntelligence/KernelBench"):
        EvaluationPrograms([str(tmp_path / "KernelBench")])


def test_of_a_kernelbench_checkout_the_tasks_are_the_programs_to_stay_clear_of(tmp_path: Path) -> None:
    for name in ("KernelBench/level1/88_Gelu_Softmax.py", "src/prompts/example.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(EVALUATION_PROGRAM)
    assert [Path(origin).name for origin, _ in EvaluationPrograms([str(tmp_path)]).programs] == [
        "88_Gelu_Softmax.py"
    ]


def test_a_folder_of_kernelbenchs_parquet_files_has_programs_to_stay_clear_of(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for level in (1, 2):
        table = pyarrow.table({"code": [EVALUATION_PROGRAM]})
        pyarrow.parquet.write_table(table, tmp_path / "data" / f"level_{level}-00000-of-00001.parquet")
    assert len(EvaluationPrograms([str(tmp_path)]).programs) == 2


# --- the build ------------------------------------------------------------------------------------


def test_the_funnel_adds_up_and_every_rejection_is_kept(tmp_path: Path) -> None:
    params = parameters()
    summary = build_dataset(params, tmp_path / "tasks", InProcess(refuse="tanh"), Quiet())
    tasks = read_tasks(tmp_path / "tasks" / "tasks.parquet")
    assert [task.split for task in tasks].count("train") == 12 and len(tasks) == 16
    assert len({task.task_id for task in tasks}) == 16
    assert all(task.evidence["eager_seconds"] > 0 and "tanh" not in task.code for task in tasks)
    rejected = pyarrow.parquet.read_table(tmp_path / "tasks" / "rejected.parquet").to_pylist()
    assert summary.candidates == len(tasks) + len(rejected) + summary.surplus
    assert {row["reason"] for row in rejected} >= {"half_precision_passes"} and all(
        "tanh" in row["code"] for row in rejected if row["reason"] == "half_precision_passes"
    )
    figures = json.loads((tmp_path / "tasks" / "metrics.json").read_text())
    assert figures["version"] == dataset_version(tmp_path / "tasks" / "tasks.parquet") == summary.version
    assert figures["rejected"] == summary.reasons and figures["admitted"] == 16
    lines = (tmp_path / "tasks" / "plots" / "funnel.csv").read_text().splitlines()
    steps = {row["step"]: int(row["candidates"]) for row in csv.DictReader(lines)}
    assert steps["composed"] == summary.candidates and steps["admitted"] == 16
    assert figures["version"][:16] in (tmp_path / "tasks" / "README.md").read_text()


def test_no_held_out_sequence_is_trained_on(tmp_path: Path) -> None:
    build_dataset(parameters(), tmp_path / "tasks", InProcess(), Quiet())
    tasks = read_tasks(tmp_path / "tasks" / "tasks.parquet")
    trained = {task.ops for task in tasks if task.split == "train"}
    assert not trained & {task.ops for task in tasks if task.split == "held_out"}


def test_the_data_set_does_not_depend_on_the_order_of_verdicts(tmp_path: Path) -> None:
    params = parameters("sandbox.build_workers=6")
    versions = {
        build_dataset(params, tmp_path / str(i), InProcess(shuffled=True, refuse="gelu"), Quiet()).version
        for i in range(3)
    }
    assert len(versions) == 1
    assert (
        build_dataset(
            parameters("sandbox.build_workers=1"), tmp_path / "narrow", InProcess(refuse="gelu"), Quiet()
        ).version
        in versions
    )


def test_nothing_is_judged_that_is_not_needed(tmp_path: Path) -> None:
    pool = InProcess()
    summary = build_dataset(parameters(), tmp_path / "tasks", pool, Quiet())
    assert len(pool.asked) == len(summary.admitted) and len(set(pool.asked)) == len(pool.asked)


def test_the_pool_is_kept_busy_behind_a_slow_head_and_never_flooded(tmp_path: Path) -> None:
    """A job that all wait for, given to the pool late, does not stand behind the whole window."""
    params = parameters("sandbox.build_workers=2")

    class Slow(InProcess):
        behind = most = 0

        def admit(self, code: str, *, headroom: bool = False) -> Future[Admission]:
            asked.append(super().admit(code))
            self.most = max(self.most, sum(not future.done() for future in asked))
            return asked[-1]

        def admission(self, code: str, *, headroom: bool = False) -> Admission:
            time.sleep(0.05)
            until = time.monotonic() + 30
            while code == self.asked[0] and len(self.asked) < 16 and time.monotonic() < until:
                time.sleep(0.01)
                self.behind = len(self.asked)
            return super().admission(code)

    asked: list[Future[Admission]] = []
    pool = Slow()
    build_dataset(params, tmp_path / "tasks", pool, Quiet())
    assert pool.behind == 16, "all that are needed, beside the head"
    assert pool.most <= 2 * 2 + 1, "two for each that is judged at once, besides the head"


def test_those_that_replace_refused_ones_are_judged_side_by_side(tmp_path: Path) -> None:
    """The last tasks of a build are asked for together, not one after another."""

    class Half(InProcess):
        beside = 0

        def admission(self, code: str, *, headroom: bool = False) -> Admission:
            if (index := self.asked.index(code)) < 16:
                return Admission(False, "zeros_pass", {}) if index % 2 else super().admission(code)
            until = time.monotonic() + 10
            while len(self.asked) < 24 and time.monotonic() < until:
                time.sleep(0.01)
            self.beside = max(self.beside, len(self.asked) - index)
            return super().admission(code)

    pool = Half()
    build_dataset(parameters("sandbox.build_workers=8"), tmp_path / "tasks", pool, Quiet())
    assert pool.beside == 8, "as many as were refused"


def test_tasks_near_an_evaluation_program_are_refused(tmp_path: Path) -> None:
    params = parameters()
    first = next(task for task in compose_tasks(params.data.seed, params.data) if task.split == "train")
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "1.py").write_text(first.code.replace("x = x", "x  =  x  # noted"))
    summary = build_dataset(
        parameters(f"data.against=[{tmp_path / 'suite'}]"), tmp_path / "tasks", InProcess(), Quiet()
    )
    assert first.task_id not in {task.task_id for task in summary.admitted}
    assert "similar_to_evaluation" in summary.reasons


def test_a_set_does_not_depend_on_what_failed_beside_it(tmp_path: Path) -> None:
    class Failing(InProcess):
        def admission(self, code: str, *, headroom: bool = False) -> Admission:
            return (
                Admission(False, "infrastructure", {"detail": "the zygote is gone"})
                if len(self.asked) > 5
                else super().admission(code)
            )

    with pytest.raises(InfrastructureError, match="zygote"):
        build_dataset(parameters(), tmp_path / "tasks", Failing(), Quiet())
    assert not (tmp_path / "tasks").exists()


def test_a_hopeless_window_ends_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"half_precision_passes.*data\.eager_seconds"):
        build_dataset(parameters(), tmp_path / "tasks", InProcess(refuse="class Model"), Quiet())
    assert not (tmp_path / "tasks").exists()
