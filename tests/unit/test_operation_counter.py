"""Operations are counted as by torch's FlopCounterMode, without its imports, and of recurrent layers too."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from components.sandbox import inside

sys.path.insert(0, str(Path(inside.__file__).parent))
from operator_modes import RECURRENT_WEIGHTS, OperationCounter


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize(
    ("module", "shape", "operations"),
    [
        (nn.Linear(64, 32), (16, 64), 2 * 16 * 64 * 32),
        (nn.Linear(64, 32), (4, 4, 64), 2 * 16 * 64 * 32),
        (nn.Bilinear(8, 8, 4), (16, 8), None),
        (nn.Conv2d(3, 8, 3), (2, 3, 10, 10), 2 * 2 * 8 * 64 * 27),
        (nn.ConvTranspose3d(4, 2, 3, stride=2), (1, 4, 5, 5, 5), None),
        (nn.MultiheadAttention(32, 4, batch_first=True), (2, 16, 32), None),
        (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), (2, 16, 32), None),
        (Attention(), (2, 4, 64, 16), None),
        (nn.GELU(), (64, 64), 0),
    ],
)
def test_operations_are_those_of_torchs_counter(
    module: nn.Module, shape: tuple[int, ...], operations: int | None
) -> None:
    x = torch.randn(shape)
    count = {nn.Bilinear: 2, nn.MultiheadAttention: 3}.get(type(module), 1)
    ours, theirs = OperationCounter(), FlopCounterMode(display=False)
    for counter in (ours, theirs):
        with torch.no_grad(), counter:
            module(*[x] * count)
    assert ours.total == theirs.get_total_flops()
    assert operations in (None, ours.total)


def test_counting_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch; from operator_modes import OperationCounter\n"
        "with OperationCounter() as counter: torch.ones(4, 8) @ torch.ones(8, 2)\n"
        "assert counter.total == 128 and 'torch._dynamo' not in sys.modules, counter.total"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(inside.__file__).parent, check=True)


@pytest.mark.parametrize(
    ("layer", "cell"), [(nn.LSTM, nn.LSTMCell), (nn.GRU, nn.GRUCell), (nn.RNN, nn.RNNCell)]
)
def test_a_recurrent_layer_counts_as_its_cells_do(
    layer: type[nn.RNNBase], cell: type[nn.RNNCellBase]
) -> None:
    steps, batch, width, hidden = 5, 3, 4, 8
    whole, cells = OperationCounter(), OperationCounter()
    with torch.no_grad():
        with whole:
            layer(width, hidden, num_layers=2, bidirectional=True)(torch.rand(steps, batch, width))
        with cells:
            for inputs in (width, 2 * hidden):
                one = cell(inputs, hidden)
                for _ in range(2 * steps):
                    one(torch.rand(batch, inputs))
    assert whole.total == cells.total > 0


def test_the_weights_of_cudnns_recurrent_layers_are_where_they_are_looked_for() -> None:
    names = [argument.name for argument in torch.ops.aten._cudnn_rnn.default._schema.arguments]
    assert names[RECURRENT_WEIGHTS["_cudnn_rnn"]] == ["weight"] and names[0] == "input"
