"""No two timed calls of a candidate get equal inputs, on tasks with every operator of the profile smoke."""

import pytest
from input_properties import check_timed_inputs

from components.bootstrap.operator_chain import CORE_OPERATORS
from components.core.config import resolve
from components.judge.judge import Judge
from components.synthesis.core_composer import compose_tasks

pytestmark = pytest.mark.usefixtures("no_compile_baseline")


def test_timed_inputs_of_a_data_set_are_different_and_have_its_structures(judge: Judge) -> None:
    params = resolve("smoke").params
    missing = {operator.name for operator in CORE_OPERATORS}
    for task in compose_tasks(params.data.seed, params.data):
        if missing.isdisjoint(task.ops):
            continue
        missing.difference_update(task.ops)
        with judge.bench(task) as bench:
            assert not bench.reference.inputs.draws, task.code
            check_timed_inputs(bench.reference, rounds=6)
        if not missing:
            break
