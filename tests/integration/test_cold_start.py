"""The cold start of a policy made from scratch: corpus, optimizer, and the continuation of a killed one."""

import random
from pathlib import Path

import pytest
import torch
from cold_start_fixtures import params as params
from cold_start_fixtures import tasks as tasks
from transformers import AutoModelForCausalLM

from components.bootstrap import cold_start
from components.bootstrap.cold_start import Muon
from components.bootstrap.corpus import plan_batches
from components.core.errors import UserError
from components.core.params import Params
from components.core.progress import Quiet
from components.core.task import KernelTask
from components.policy.checkpoint import verify_checkpoint


class Watch:
    """Keeps the losses, and dies at a step if told to."""

    def __init__(self, die_at: int = -1):
        self.losses: dict[int, float] = {}
        self.die_at = die_at

    def update(self, stage: str, step: int, total: int, **figures: float) -> None:
        if "loss" in figures:
            self.losses[step] = figures["loss"]
        if step == self.die_at:
            raise KeyboardInterrupt


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def run(
    params: Params, tasks: list[KernelTask], out: Path, progress: Watch | Quiet
) -> dict[str, torch.Tensor]:
    manifest = cold_start.coldstart(params, iter(tasks), out, dataset="d", code="c", progress=progress)
    assert verify_checkpoint(out) == manifest and not (out.parent / "state").exists()
    return weights(out)


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(cold_start, "SAVE_SECONDS", 0.0)


@pytest.mark.usefixtures("one_core")
def test_a_killed_cold_start_continues_to_the_same_weights(
    params: Params, tasks: list[KernelTask], tmp_path: Path
) -> None:
    whole = run(params, tasks, tmp_path / "a/checkpoint", watch := Watch())
    assert watch.losses[8] < watch.losses[1]
    torch.set_num_threads(3)
    with pytest.raises(KeyboardInterrupt):
        cold_start.coldstart(
            params, iter(tasks), tmp_path / "b/checkpoint", dataset="d", code="c", progress=Watch(die_at=5)
        )
    assert torch.get_num_threads() == 3
    assert not (tmp_path / "b/checkpoint").exists()
    rest = run(params, [], tmp_path / "b/checkpoint", again := Watch())
    assert min(again.losses) == 5, "step 5 died after its update and before its state was kept"
    assert all(torch.equal(whole[name], rest[name]) for name in whole)


@pytest.mark.usefixtures("one_core")
def test_state_of_other_parameters_is_not_continued(
    params: Params, tasks: list[KernelTask], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        cold_start.coldstart(
            params, iter(tasks), tmp_path / "checkpoint", dataset="d", code="c", progress=Watch(die_at=5)
        )
    changed = params.model_copy(
        update={"coldstart": params.coldstart.model_copy(update={"learning_rate": 0.001})}
    )
    run(changed, tasks, tmp_path / "checkpoint", watch := Watch())
    assert min(watch.losses) == 1


@pytest.mark.usefixtures("one_core")
def test_too_few_tasks_are_a_mistake_of_the_caller(
    params: Params, tasks: list[KernelTask], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"coldstart\.demonstrations"):
        cold_start.coldstart(
            params, iter(tasks[:5]), tmp_path / "checkpoint", dataset="d", code="c", progress=Quiet()
        )


def test_held_out_tasks_are_never_demonstrated(
    params: Params, tasks: list[KernelTask], tmp_path: Path
) -> None:
    held_out = [task.model_copy(update={"split": "held_out"}) for task in tasks]
    with pytest.raises(UserError):
        cold_start.make_corpus(params, iter(held_out), tmp_path / "corpus", Quiet())


def test_the_plan_uses_every_conversation_once_an_epoch_and_fills_its_micro_batches() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(20, 200) for _ in range(1000)]
    batches = plan_batches(lengths, steps=1000, tokens_per_step=4000, microbatches=4, seed=1)
    assert batches == plan_batches(lengths, steps=1000, tokens_per_step=4000, microbatches=4, seed=1)
    flat = [batch for step in batches for batch in step]
    assert all(len(batch) * max(lengths[i] for i in batch) <= 1000 for batch in flat)
    seen = [index for batch in flat for index in batch]
    assert sorted(seen[:1000]) == list(range(1000)) and seen[:1000] != seen[1000:2000]
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in flat)
    assert sum(lengths[i] for i in seen) > 0.95 * padded


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_muon_steps_as_torchs_own_does_in_lower_precision(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start = torch.randn(shape)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [Muon([ours], lr=0.1), torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0)]
    for _ in range(3):
        gradient = torch.randn(shape)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert (ours - theirs).norm() < 0.02 * (theirs - start).norm()
