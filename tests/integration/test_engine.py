"""The DeepSpeed engine: micro-batches change nothing, a saved state continues to the same bits."""

import functools
import os
import subprocess
from pathlib import Path

import pytest
import torch
from engine_fixtures import (
    STAGES,
    engine_of,
    largest_difference,
    parameters,
    settings,
    train,
    uneven,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters
from training_fixtures import VOCABULARY, tiny_policy

from components.core.config import resolve
from components.training import output_head
from components.training.batches import Microbatch, Streams, pack
from components.training.deepspeed_config import drop_unsearchable_folders
from components.training.engine import DeepSpeedEngine, MetricSums, evaluate, train_step
from components.training.fine_tuning import likelihood_loss
from components.training.networks import Actor, load_policy, tile_mlps


def test_micro_batches_of_any_size_make_the_same_step() -> None:
    one, many = engine_of(0, tokens=10_000), engine_of(0, tokens=25)
    assert train(one, range(3)) == pytest.approx(train(many, range(3)), abs=1e-5)
    assert largest_difference(parameters(one), parameters(many)) < 1e-6
    start = dict(Actor(tiny_policy(), 1.0).named_parameters())
    assert largest_difference(parameters(one), start) > 1e-4, "nothing was trained"


def test_compiled_layers_make_the_same_step_and_do_not_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine_of(1, tokens=10_000)
    # The kernels of other backends take a minute to compile.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(output_head, "_compiled", functools.cache(output_head._compiled.__wrapped__))
    compiled = engine_of(1, tokens=10_000, is_compiled=True)
    torch._dynamo.reset()
    counters.clear()
    assert train(compiled, range(1)) == pytest.approx(train(plain, range(1)), abs=1e-5)
    assert largest_difference(parameters(compiled), parameters(plain)) < 1e-6
    frames = counters["frames"]["ok"]
    assert frames >= 2, "neither layers nor scores were compiled"
    compiled.module.policy(torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 3))
    assert counters["frames"]["ok"] == frames


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
    total, _ = likelihood_loss(network, pack(batch, range(7)), Streams())
    (total / batch.tokens).backward()
    expected = torch.stack(
        [parameter.grad.norm() for parameter in network.parameters() if parameter.grad is not None]
    ).norm()
    found = train_step(engine, batch, Streams(), range(7), likelihood_loss, MetricSums(), learning_rate=0.001)
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

    def forward(self) -> tuple[Tensor]:
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
        (constants,) = network()
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
        monkeypatch.setattr("components.training.output_head.LOGITS_BYTES", limit)
        network = Actor(tiny_policy(), 0.7)
        likelihood_loss(network, pack(batch, range(7)), Streams())[0].backward()
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
    logprob, entropy = evaluate(engine, batch)
    for row, own in enumerate(batch.action_mask):
        ids = torch.tensor(batch.ids[row])[None].long()
        with torch.no_grad():
            expected = torch.log_softmax(policy(ids).logits[0, :-1], -1)
        mask = torch.tensor(own[1:]).bool()
        chosen = expected.gather(1, ids[0, 1:, None])[:, 0]
        found = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
        torch.testing.assert_close(logprob[found], chosen[mask], atol=1e-5, rtol=0)
        torch.testing.assert_close(
            entropy[found], -(expected.exp() * expected).sum(-1)[mask], atol=1e-5, rtol=0
        )


def test_rotary_frequencies_are_not_rounded_in_a_sharded_bfloat16_model(
    tmp_path: Path,
) -> None:
    tiny_policy().save_pretrained(tmp_path)
    params = resolve("ci", ("engine.zero_stage=3", "engine.dtype=bfloat16")).params
    model = load_policy(tmp_path, params)
    assert {buffer.dtype for name, buffer in model.named_buffers() if "inv_freq" in name} == {torch.float32}


def test_a_program_that_is_not_installed_is_not_found_beside_a_folder_that_may_not_be_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed looks for numactl so; as root the test takes the rights of another account meanwhile."""
    (tmp_path / "closed").mkdir(mode=0)
    monkeypatch.setenv("PATH", f"{tmp_path / 'closed'}:/usr/bin")
    account = os.geteuid()
    if account == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(PermissionError):
            subprocess.run(["not-installed"], check=False)
        drop_unsearchable_folders()
        with pytest.raises(FileNotFoundError):
            subprocess.run(["not-installed"], check=False)
    finally:
        os.seteuid(account)


@pytest.mark.parametrize("length", [1, 7, 9, 16])
def test_tiled_feed_forward_layers_make_the_same_gradients(length: int) -> None:
    """Also if only the weights of the first feed-forward layer are trained, whose input has no gradient."""
    ids = torch.arange(length)[None]
    for names in ("", "layers.0.mlp"):
        gradients = []
        for tokens in (0, 4):
            model = tiny_policy()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(names in name)
            if tokens:
                tile_mlps(model, settings(0).model_copy(update={"mlp_tokens": tokens}))
            model(ids).logits.square().mean().backward()
            gradients.append({name: one.grad for name, one in model.named_parameters() if one.requires_grad})
        torch.testing.assert_close(gradients[1], gradients[0])
        assert gradients[0]
