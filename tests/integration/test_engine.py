"""The DeepSpeed engine: ranks and micro-batches change nothing, a saved state continues to the same bits.

    torchrun --nproc-per-node 2 tests/integration/test_engine.py OUT

is what the test with two ranks starts: it trains under every ZeRO stage and rank 0 saves the parameters.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from training_fixtures import VOCABULARY, tiny_policy

from components.core import config
from components.training.batches import Batch, pad
from components.training.engine import DeepSpeedEngine
from components.training.losses import likelihood_loss_sum
from components.training.microbatching import MetricSums, evaluate, train_step
from components.training.networks import Actor

STAGES = (0, 1, 2, 3)


def settings(
    zero_stage: int, tokens: int = 40, dtype: str = "float32", checkpointing: bool = False
) -> config.Engine:
    return config.Engine.model_validate(
        {
            "zero_stage": zero_stage,
            "dtype": dtype,
            "tokens_per_microbatch": tokens,
            "activation_checkpointing": checkpointing,
            "cpu_offload": False,
            "collective_seconds": 600.0,
            "ranks": 0,
            "resource": "",
        }
    )


def uneven(rows: int = 7) -> Batch:
    """Rows of 4 to 22 tokens, some of them observations."""
    source = torch.Generator().manual_seed(1)
    examples = []
    for row in range(rows):
        ids = torch.randint(3, VOCABULARY, (4 + 3 * row,), generator=source).tolist()
        examples.append((ids, [0, 0, *(int(place % 4 > 0) for place in range(len(ids) - 2))]))
    return pad(examples)


def loss(network: nn.Module, rows: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    logprob, _ = network(rows.ids, rows.action_mask)
    total = likelihood_loss_sum(logprob, rows.action_mask)
    return total, {"loss": total}


def train(engine: DeepSpeedEngine, steps: range) -> list[float]:
    """Steps on parts of the batch; returns each step's loss per own token, then its gradient norm.

    The norm matters: AdamW forgives a gradient that is wrong by a factor.
    """
    batch, losses, norms = uneven(), [], []
    for step in steps:
        sums, rows = MetricSums(), [row for row in range(7) if (row + step) % 3]
        norms.append(
            train_step(
                engine,
                batch,
                rows,
                loss,
                sums,
                learning_rate=3e-4,
            )
        )
        losses.append(sums.means(engine.world, int(batch.action_mask[rows].sum()))["loss"])
    return losses + norms


def engine_of(zero_stage: int, **options: int | str | bool) -> DeepSpeedEngine:
    return DeepSpeedEngine(
        Actor(tiny_policy(), 1.0), settings(zero_stage, **options), device="cpu", gradient_clip=1.0
    )


def parameters(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    with engine.gathered_parameters():
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


def test_micro_batches_of_any_size_make_the_same_step() -> None:
    one, many = engine_of(0, tokens=10_000), engine_of(0, tokens=25)
    assert train(one, range(3)) == pytest.approx(train(many, range(3)), abs=1e-5)
    assert largest_difference(parameters(one), parameters(many)) < 1e-6
    start = dict(Actor(tiny_policy(), 1.0).named_parameters())
    assert largest_difference(parameters(one), start) > 1e-4, "nothing was trained"


@pytest.mark.parametrize("zero_stage", STAGES)
def test_a_saved_state_continues_to_the_same_bits(zero_stage: int, tmp_path: Path) -> None:
    whole = engine_of(zero_stage)
    train(whole, range(2))
    whole.save(tmp_path / "state")
    torch.manual_seed(5)
    expected = train(whole, range(2, 4))
    resumed = engine_of(zero_stage)
    resumed.load(tmp_path / "state")
    assert train(resumed, range(2, 4)) == expected
    assert largest_difference(parameters(resumed), parameters(whole)) == 0


def test_zero_stages_train_alike() -> None:
    engines = [engine_of(zero_stage) for zero_stage in STAGES]
    losses = [train(engine, range(3)) for engine in engines]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-5)
    assert all(
        largest_difference(parameters(engines[0]), parameters(engine)) < 1e-6 for engine in engines[1:]
    )


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_the_gradient_norm_is_that_before_clipping(zero_stage: int) -> None:
    engine, batch = engine_of(zero_stage), uneven()
    network = Actor(tiny_policy(), 1.0)
    total, _ = loss(network, batch)
    (total / batch.tokens).backward()
    expected = torch.stack(
        [parameter.grad.norm() for parameter in network.parameters() if parameter.grad is not None]
    ).norm()
    found = train_step(engine, batch, range(7), loss, MetricSums(), learning_rate=0.001)
    assert found == pytest.approx(float(expected), rel=1e-4)


def test_bfloat16_and_recomputed_activations_train() -> None:
    engine = engine_of(1, dtype="bfloat16", checkpointing=True)
    losses = train(engine, range(6))
    assert losses[5] < losses[0]


def test_no_native_extension_is_built_on_cpu() -> None:
    engine_of(1)
    from deepspeed import comm

    assert comm.comm.cdb.shm_comm_op is None


def test_recomputing_sliced_logits_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, gradients = uneven(), []
    for limit in (2**26, VOCABULARY * 8):
        monkeypatch.setattr("components.training.networks.LOGITS", limit)
        network = Actor(tiny_policy(), 0.7)
        loss(network, batch)[0].backward()
        gradients.append(
            {
                name: parameter.grad
                for name, parameter in network.named_parameters()
                if parameter.grad is not None
            }
        )
    assert largest_difference(*gradients) < 1e-4


def test_an_evaluation_equals_the_model_s_own_log_probabilities() -> None:
    policy, batch, engine = tiny_policy(), uneven(), engine_of(1)
    logprob, entropy = evaluate(engine.forward, engine.world, batch, 40)
    for row, length in enumerate(batch.lengths):
        ids = batch.ids[row : row + 1, :length]
        with torch.no_grad():
            expected = torch.log_softmax(policy(ids).logits[0, :-1], -1)
        own = batch.action_mask[row, 1:length]
        chosen = expected.gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(logprob[row, 1:length][own], chosen[own], atol=1e-5, rtol=0)
        torch.testing.assert_close(
            entropy[row, 1:length][own], -(expected.exp() * expected).sum(-1)[own], atol=1e-5, rtol=0
        )
        assert float(logprob[row, 1:length][~own].abs().sum()) == 0


@pytest.mark.slow
def test_two_ranks_with_uneven_micro_batches_equal_one_process(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        __file__,
        str(tmp_path),
    ]
    environment = os.environ | {
        "PYTHONPATH": f"{config.PROJECT}:{config.PROJECT / 'tests' / 'fixtures'}",
        "OMP_NUM_THREADS": "1",
    }
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    one = engine_of(1, tokens=10_000)
    losses = train(one, range(3))
    for zero_stage in STAGES:
        saved = load_file(tmp_path / f"zero{zero_stage}.safetensors")
        expected = losses if zero_stage else losses[:3] + [math.nan] * 3
        assert saved.pop("losses").tolist() == pytest.approx(expected, abs=1e-5, nan_ok=True)
        logprob, _ = evaluate(one.forward, one.world, uneven(), 10_000)
        torch.testing.assert_close(saved.pop("logprob"), logprob, atol=1e-5, rtol=0)
        assert largest_difference(saved, parameters(one)) < 1e-6, f"ZeRO {zero_stage}"


def main(out: Path) -> None:
    for zero_stage in STAGES:
        engine = engine_of(zero_stage)
        losses = train(engine, range(3))
        logprob, _ = evaluate(engine.forward, engine.world, uneven(), 40)
        tensors = parameters(engine) | {
            "losses": torch.tensor(losses, dtype=torch.float64),
            "logprob": logprob,
        }
        if engine.world.rank == 0:
            save_file(tensors, out / f"zero{zero_stage}.safetensors")
        engine.world.barrier()
    sys.stderr.flush()
    # ZeRO 3 sometimes aborts when the interpreter ends ("terminate called without an active exception").
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
