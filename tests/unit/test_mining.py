"""Composition of mined operators, without the table of all of them."""

import shutil
from pathlib import Path

import pytest
from synthesis_fixtures import InProcess, parameters

from components.core.config import PROJECT
from components.core.errors import UserError
from components.core.progress import Quiet
from components.synthesis import mine_torch, mine_transformers, operator_table
from components.synthesis.dataset import build_dataset, task_quotas
from components.synthesis.mined_operators import OperatorTemplate, output_layout
from components.synthesis.operator_ablation import split_of
from components.synthesis.source_extraction import CannotExtract, LibraryFile
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
        assert split_of(("nn.LeakyReLU", "torch.sum"), seed) == split_of(("F.leaky_relu", "torch.sum"), seed)


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


def test_operators_are_mined_again_if_a_rule_changes_and_not_for_a_docstring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mined: list[str] = []

    def load(name: str, more: str) -> list[str]:
        """Load the table with `more` at the beginning of a source of the rules; return the copies so far."""
        for rule in operator_table.RULES:
            copy = tmp_path / name / "components" / rule
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(PROJECT / "components" / rule, copy)
        copy.write_text(more + copy.read_text())
        monkeypatch.setattr(operator_table, "PROJECT", tmp_path / name)
        monkeypatch.setattr(mine_torch, "mine", lambda: (mined.append(name) or [], {}))
        monkeypatch.setattr(mine_transformers, "mine", lambda: ([], {}))
        operator_table.load_operator_table(tmp_path / "tables", Quiet())
        return mined

    assert load("first", "") == ["first"]
    assert load("comment", "# Another comment.\n") == ["first"]
    assert load("rule", "CHANGED = 1\n") == ["first", "rule"]


def test_a_module_whose_family_has_no_configuration_is_left_out_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "modeling.py").write_text(
        "from torch import nn\n\nclass SmallMLP(nn.Module):\n    def __init__(self, config):\n"
        "        super().__init__()\n        self.linear = nn.Linear(config.unknown_size, 8)\n\n"
        "    def forward(self, hidden_states):\n        return self.linear(hidden_states)\n"
    )
    with pytest.raises(CannotExtract, match="unknown_size"):
        mine_transformers._module(LibraryFile(tmp_path / "modeling.py"), "small", "SmallMLP", None)
