"""The DeepSpeed engine: micro-batches change nothing, a saved state continues to the same bits."""

from pathlib import Path

import pytest
import torch
from engine_fixtures import (
    STAGES,
    engine_of,
    largest_difference,
    loss,
    parameters,
    settings,
    train,
    uneven,
)
from torch import Tensor, nn
from training_fixtures import VOCABULARY, tiny_policy

from components.training.batches import Microbatch
from components.training.engine import DeepSpeedEngine
from components.training.microbatching import MetricSums, evaluate, train_step
from components.training.networks import Actor


def test_micro_batches_of_any_size_make_the_same_step() -> None:
    one, many = engine_of(0, tokens=10_000), engine_of(0, tokens=25)
    assert train(one, range(3)) == pytest.approx(train(many, range(3)), abs=1e-5)
    assert largest_difference(parameters(one), parameters(many)) < 1e-6
    start = dict(Actor(tiny_policy(), 1.0).named_parameters())
    assert largest_difference(parameters(one), start) > 1e-4, "nothing was trained"


@pytest.mark.parametrize(
    ("zero_stage", "dtype"),
    [*((zero_stage, "float32") for zero_stage in STAGES), (1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16")],
)
def test_a_saved_state_continues_to_the_same_bits(zero_stage: int, dtype: str, tmp_path: Path) -> None:
    whole = engine_of(zero_stage, dtype=dtype)
    train(whole, range(2))
    whole.save(tmp_path / "state")
    torch.manual_seed(5)
    expected = train(whole, range(2, 4))
    resumed = engine_of(zero_stage, dtype=dtype)
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


class Constants(nn.Module):
    """A network whose only output is its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.constants = nn.Parameter(torch.zeros(4))

    def forward(self, ids: Tensor, action_mask: Tensor) -> tuple[Tensor]:
        return (self.constants * 1.0,)


@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_small_gradients_of_many_micro_batches_survive_in_bfloat16(
    zero_stage: int, cpu_offload: bool
) -> None:
    options = settings(zero_stage, dtype="bfloat16").model_copy(update={"cpu_offload": cpu_offload})
    engine = DeepSpeedEngine(Constants(), options, device="cpu", gradient_clip=1e6)
    # In bfloat16 1 + 2^-9 is 1.
    gradients = [1.0] + [2.0**-9] * 127

    def share(network: nn.Module, microbatch: Microbatch) -> Tensor:
        (constants,) = network(torch.zeros(1, 1), torch.ones(1, 1))
        return constants.float().sum() * gradients[microbatch.rows[0]]

    norm = engine.step([Microbatch((row,)) for row in range(128)], share, learning_rate=1e-3)
    # ZeRO 1 sends the sum over the micro-batches, which is 1.25, in bfloat16.
    assert norm == pytest.approx(sum(gradients) * 4**0.5, rel=2**-8)


def test_no_native_extension_is_built_on_cpu() -> None:
    engine_of(1)
    from deepspeed import comm

    assert comm.comm.cdb.shm_comm_op is None


def test_recomputing_sliced_logits_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, gradients = uneven(), []
    for limit in (2**28, 4 * VOCABULARY * 8):
        monkeypatch.setattr("components.training.token_scores.LOGITS_BYTES", limit)
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
