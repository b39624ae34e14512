"""Two ranks of `cuda-agent train` make what one process makes."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from train_command_fixtures import alone as alone
from train_command_fixtures import inputs as inputs
from train_command_fixtures import train, words


@pytest.mark.parametrize(
    ("launcher", "sets"),
    [
        ("--ranks", ()),
        ("torchrun", ()),
        ("--ranks", ("engine.zero_stage=3", "engine.sequence_parallel=2", "engine.mlp_tokens=16")),
    ],
)
def test_two_ranks_make_what_one_makes(
    launcher: str,
    sets: tuple[str, ...],
    inputs: Path,
    alone: tuple[Path, dict[str, Any]],
    tmp_path: Path,
) -> None:
    both = [*words(inputs, tmp_path), *(word for value in sets for word in ("--set", value))]
    if launcher == "torchrun":
        two = train(
            *both,
            program=(
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                "-m",
                "components.cli",
            ),
        )
    else:
        two = train(*both, "--ranks", "2", program=("-m", "components.cli"))
    assert two.returncode == 0, two.stderr[-3000:]
    assert json.loads(two.stdout)["figures"]["trajectories"] == alone[1]["figures"]["trajectories"]
    heads = [
        load_file(folder / "critic" / "checkpoint" / "value_head.safetensors")
        for folder in (alone[0], tmp_path)
    ]
    for name, tensor in heads[0].items():
        assert float((tensor - heads[1][name]).abs().max()) < 1e-5, name
