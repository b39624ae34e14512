"""Composition of mined operators, without the table of all of them."""

from pathlib import Path

import pytest
from synthesis_fixtures import InProcess, parameters

from components.core.errors import UserError
from components.core.progress import Quiet
from components.synthesis.dataset import build_dataset, task_quotas
from components.synthesis.mined_operators import OperatorTemplate, output_layout
from components.synthesis.operator_ablation import is_held_out
from components.synthesis.torch_composer import every_operator_matters


def test_a_layout_that_does_not_fit_is_found_on_meta_tensors() -> None:
    flat = OperatorTemplate("torch.Tensor.view", "{x}.view(-1, {last})", (3,))
    assert output_layout(flat, (2, 16, 64), (1024, 64, 1)) is not None
    assert output_layout(flat, (2, 16, 64), (1024, 1, 16)) is None


def test_an_operator_without_effect_is_not_composed() -> None:
    square, relu = (
        OperatorTemplate("torch.square", "torch.square({x})", (2,)),
        OperatorTemplate("F.relu", "F.relu({x})", (2,)),
    )
    assert every_operator_matters((relu,), (8, 64)) and not every_operator_matters((square, relu), (8, 64))


def test_however_it_is_written_a_sequence_is_held_out_or_not() -> None:
    for seed in range(20):
        assert is_held_out(("nn.LeakyReLU", "torch.sum"), seed) == is_held_out(
            ("F.leaky_relu", "torch.sum"), seed
        )


def test_targets_follow_the_mix() -> None:
    wanted = task_quotas(
        parameters(
            "data.operators=all", "data.tasks=6000", "data.held_out=250", "data.transformers_share=0.012"
        ).data
    )
    assert (
        sum(count for (split, _), count in wanted.items() if split == "train") == 6000
        and wanted["train", "transformers"] == 72
    )


def test_the_mined_table_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.operators"):
        build_dataset(parameters("data.operators=all"), tmp_path / "tasks", InProcess(), Quiet())
