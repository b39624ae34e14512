"""The cold start of several processes: they learn what one does, and none waits for one that is gone."""

import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from cold_start_fixtures import params as params
from cold_start_fixtures import tasks as tasks
from transformers import AutoModelForCausalLM

from components.bootstrap import cold_start
from components.core.errors import StageFailed
from components.core.params import Params
from components.core.progress import Quiet
from components.core.task import KernelTask
from components.policy.checkpoint import verify_checkpoint


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def run(params: Params, tasks: list[KernelTask], out: Path, progress: Quiet) -> dict[str, torch.Tensor]:
    manifest = cold_start.coldstart(params, iter(tasks), out, dataset="d", code="c", progress=progress)
    assert verify_checkpoint(out) == manifest and not (out.parent / "state").exists()
    return weights(out)


def test_two_processes_learn_what_one_does(
    params: Params, tasks: list[KernelTask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for count in (1, 2):
        monkeypatch.setattr(cold_start.os, "cpu_count", lambda count=count: count)
        results.append(run(params, tasks, tmp_path / str(count) / "checkpoint", Quiet()))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, atol=2e-3, rtol=0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ends", "says"), [((), StageFailed), ((KeyboardInterrupt(),), KeyboardInterrupt)])
def test_a_second_process_killed_while_it_waits_ends_the_first_at_once(
    params: Params,
    tasks: list[KernelTask],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: tuple[BaseException, ...],
    says: type[BaseException],
) -> None:
    """As one signal to both does, or a kernel that is out of memory."""
    monkeypatch.setattr(cold_start.os, "cpu_count", lambda: 2)

    class Kill:
        def update(self, stage: str, step: int, total: int, **figures: float) -> None:
            if "loss" in figures and step == 3:
                time.sleep(1)  # until it waits for this process
                for other in multiprocessing.active_children():
                    other.kill()
                    other.join()
                for error in ends:
                    raise error

    threads = torch.get_num_threads()
    with pytest.raises(says):
        cold_start.coldstart(
            params, iter(tasks), tmp_path / "checkpoint", dataset="d", code="c", progress=Kill()
        )
    assert not multiprocessing.active_children() and torch.get_num_threads() == threads
    run(params, [], tmp_path / "checkpoint", Quiet())
