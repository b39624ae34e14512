"""Ranks of the engine equal one process, and value pretraining keeps its trajectories on disk."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sequence_fixtures
import stored_rows_fixtures
import torch
import vocabulary_fixtures
from engine_fixtures import STAGES, engine_of, largest_difference, parameters, train, uneven
from rank_processes import two_ranks
from safetensors.torch import load_file

from components.core import config
from components.training.engine import evaluate


def test_two_ranks_with_uneven_micro_batches_equal_one_process(tmp_path: Path) -> None:
    two_ranks("engine_fixtures.py", tmp_path)
    one = engine_of(1, tokens=10_000)
    losses = train(one, range(3))
    for zero_stage in STAGES:
        saved = load_file(tmp_path / f"zero{zero_stage}.safetensors")
        expected = losses if zero_stage else losses[:3] + [math.nan] * 3
        assert saved.pop("losses").tolist() == pytest.approx(expected, abs=1e-5, nan_ok=True)
        logprob, _ = evaluate(one, uneven())
        torch.testing.assert_close(saved.pop("logprob"), logprob, atol=1e-5, rtol=0)
        assert largest_difference(saved, parameters(one)) < 1e-6, f"ZeRO {zero_stage}"


def test_ranks_with_different_numbers_of_slices_of_logits_equal_one_process(tmp_path: Path) -> None:
    two_ranks("vocabulary_fixtures.py", tmp_path)
    for is_tied in (True, False):
        two = load_file(tmp_path / f"tied-{is_tied}.safetensors")
        one = vocabulary_fixtures.train(1, is_tied)
        assert two.keys() == one.keys()
        for name, expected in one.items():
            if name in vocabulary_fixtures.SCORES:  # about 12 nats, sums over the vocabulary in float32
                torch.testing.assert_close(two[name], expected, atol=0, rtol=2e-6)
            else:  # Two steps change weights by 6e-4. AdamW magnifies rounding in gradients close to zero.
                torch.testing.assert_close(two[name], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("zero_stage", "heads", "kv_heads", "is_tied"),
    [(3, 2, 1, True), (3, 4, 2, False), (1, 2, 2, True), (2, 4, 1, False)],
)
def test_ranks_that_share_each_forward_pass_equal_one_process(
    zero_stage: int, heads: int, kv_heads: int, is_tied: bool, tmp_path: Path
) -> None:
    two_ranks("sequence_fixtures.py", tmp_path, zero_stage, heads, kv_heads, int(is_tied))
    shared = load_file(tmp_path / "shared.safetensors")
    alone = sequence_fixtures.train(zero_stage, heads, kv_heads, is_tied, 1)
    assert shared.keys() == alone.keys()
    for name, expected in alone.items():
        # AdamW magnifies rounding in gradients close to zero.
        assert torch.allclose(shared[name], expected, atol=1e-5, rtol=1e-5), name
    assert float(alone["critic-output-0"].std()) > 0


def test_value_pretraining_maps_its_trajectories_instead_of_padding_them(tmp_path: Path) -> None:
    tokens = stored_rows_fixtures.write(tmp_path)
    ran = subprocess.run(
        [sys.executable, stored_rows_fixtures.__file__, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(config.PROJECT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    padded = stored_rows_fixtures.TRAJECTORIES * stored_rows_fixtures.LONGEST * 18
    # Two fifths of the tokens are own tokens, which have values, advantages and returns of 4 bytes; what else
    # is needed belongs to one micro-batch.
    assert int(ran.stdout) < 4 * 4 * 0.4 * tokens + 2**27 < padded / 10
