"""How a class of a user's file becomes a task, and which mistakes are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from components.agent.optimize.user_module import user_task
from components.core.errors import UserError

LAYER = """
import torch.nn as nn

class Layer(nn.Module):
    def __init__(self, width=8):
        super(Layer, self).__init__()
        self.width = width

    def forward(self, x):
        return x * self.width
"""


def test_a_class_of_any_file_becomes_a_task(tmp_path: Path) -> None:
    file = tmp_path / "layer.py"
    file.write_text(LAYER)
    for inputs in ("torch.ones(2, 3)", "[torch.ones(2, 3)]", "torch.ones(2, 3),"):
        space: dict[str, Any] = {}
        exec(user_task(file, "Layer", inputs, "[4]").code, space)
        assert torch.equal(
            space["Model"](*space["get_init_inputs"]())(*space["get_inputs"]()), torch.full((2, 3), 4.0)
        )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("Lair", "torch.ones(2)", ""), "the file has no class of this name; it has Layer"),
        (("Layer", "", ""), "--inputs: missing"),
        (("Layer", "torch.ones(", ""), "not a Python expression"),
        (("Layer", "torch.ones(2)", "4 4"), "--init 4 4: not a Python expression"),
        (("", "torch.ones(2)", ""), "name it with --class"),
        (("", "", ""), "add Model, get_inputs(), get_init_inputs()"),
    ],
)
def test_a_mistake_in_what_is_given_is_one_sentence(
    tmp_path: Path, arguments: tuple[str, str, str], says: str
) -> None:
    file = tmp_path / "layer.py"
    file.write_text(LAYER)
    with pytest.raises(UserError) as raised:
        user_task(file, *arguments)
    assert says in str(raised.value)


@pytest.mark.parametrize("text", ["class Layer(:", "\0", "(" * 100_000])
def test_a_file_that_is_no_python_is_bad_input(tmp_path: Path, text: str) -> None:
    (tmp_path / "layer.py").write_text(text)
    with pytest.raises(UserError, match="not valid Python"):
        user_task(tmp_path / "layer.py", "Layer", "torch.ones(2)", "")
