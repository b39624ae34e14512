"""Weights that a trainer broadcasts to the workers of vLLM servers, here by gloo, on a GPU by NCCL."""

import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_fixtures import free_port, process
from torch import Tensor
from training_fixtures import episode, params, stage, tiny_policy, tiny_tokenizer
from vllm_double import Engine, Worker, serving

from components.agent.policies import open_sampler
from components.core.config import PROJECT
from components.core.errors import UserError
from components.policy.checkpoint import save_checkpoint
from components.policy.sampler import complete_all
from components.policy.vllm import weight_group
from components.policy.vllm import worker as worker_module
from components.policy.vllm.fleet import Fleet
from components.policy.vllm.sampler import VllmSampler
from components.policy.weight_stream import weight_buckets
from components.training.run_stage import run_stage

CONTEXT = 128
# Bytes, of which the weights of the tiny policy need several times as many.
BUCKET = 10_000
SETS = ("policy.backend=vllm-server", f"policy.context={CONTEXT}", "policy.weight_transfer=nccl")


def engine(version: str = "0.33.0", workers: int = 2) -> Engine:
    return Engine(tiny_policy(seed=3), tiny_tokenizer(), CONTEXT, version=version, workers=workers)


def sampler(*urls: str) -> VllmSampler:
    fleet = Fleet(urls, context=CONTEXT, version="v0", patience=60.0)
    return VllmSampler(fleet, (2,), params(*SETS).policy, version="v0")


def push(one: VllmSampler, seed: int) -> list[bool]:
    """Push the weights of the tiny policy `seed`, and return for each server whether it is usable."""
    one.push(weight_buckets(tiny_policy(seed=seed), BUCKET), version=f"v{seed}")
    return [replica.is_usable() for replica in one.fleet.replicas]


def has_weights(server: Engine, seed: int) -> bool:
    trained = dict(tiny_policy(seed=seed).named_parameters())
    return all(torch.equal(value, trained[name]) for name, value in server.model.named_parameters())


def joined(server: Engine) -> int:
    """Return how often the workers of a server were asked to join a group."""
    return sum(body.get("method") == "join_group" for _, body in server.bodies)


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0"])
def test_every_worker_of_two_servers_gets_every_weight_over_one_group(version: str) -> None:
    servers = [engine(version), engine(version)]
    with serving(servers[0]) as url, serving(servers[1]) as other:
        one = sampler(url, other)
        for seed in (8, 9):
            assert push(one, seed) == [True, True]
            assert all(has_weights(server, seed) and not server.paused for server in servers)
        assert [joined(server) for server in servers] == [1, 1], "the group is kept between pushes"
        assert len(complete_all(one, [[1, 5]], max_new_tokens=3, temperature=0.0, seed=0)[0].ids) > 0
    facts = json.loads((PROJECT / "tests" / "data" / "vllm_contract.json").read_text())[version]
    assert set(servers[0].calls) <= set(facts["routes"])
    received = [body["kwargs"] for _, body in servers[0].bodies if body.get("method") == "receive_bucket"]
    assert len(received) > 6 and {bucket["number"] for bucket in received} >= {0, 1, 2, 3}


def test_weights_that_a_worker_did_not_load_are_noticed() -> None:
    stale = engine()
    stale.workers[1].model.loses_updates = True
    sentence = pytest.raises(UserError, match=r"does not hold .* \(its parameters have other values\)")
    with serving(engine()) as url, serving(stale) as other, sentence:
        push(sampler(url, other), 8)
    assert not stale.paused, "sampling goes on after a failed push"


def test_a_worker_of_another_group_joins_the_group_of_the_trainer_that_pushes() -> None:
    shared = engine()
    with serving(shared) as url:
        first, second = sampler(url), sampler(url)
        for seed, one in ((7, first), (8, second), (9, first)):
            assert push(one, seed) == [True] and has_weights(shared, seed)
    assert joined(shared) == 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "policy"
    tiny_policy(seed=3).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_fails_during_a_push_is_left_out_and_joins_a_later_one(
    end: signal.Signals, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The time is that of a machine that runs other tests at the same time.
    monkeypatch.setattr(weight_group, "BROADCAST_SECONDS", 10.0)
    left, port = engine(), free_port()
    with serving(left) as url:
        with process(folder, port, workers=2) as server:
            one = sampler(url, f"http://127.0.0.1:{port}")
            assert push(one, 7) == [True, True]

            def interrupted() -> Iterator[Mapping[str, Tensor]]:
                for number, bucket in enumerate(weight_buckets(tiny_policy(seed=8), BUCKET)):
                    if number == 2:
                        server.send_signal(end)
                    yield bucket

            started = time.monotonic()
            one.push(interrupted(), version="v8")
            assert time.monotonic() - started < 5 * weight_group.BROADCAST_SECONDS
            assert [replica.is_usable() for replica in one.fleet.replicas] == [True, False]
            assert has_weights(left, 8) and joined(left) == 2
            assert push(one, 9) == [True, False] and joined(left) == 2
        with process(folder, port, workers=2):
            one.fleet.all(one.fleet.replicas, lambda replica: one.fleet._examine(replica, time.monotonic()))
            assert push(one, 10) == [True, True] and has_weights(left, 10)
        assert push(one, 11) == [True, False] and has_weights(left, 11), "it ended between two pushes"


class Unreachable(Worker):
    """A worker whose server closes the connection when it asks for the first bucket."""

    asked = 0

    def receive_bucket(self, **arguments: Any) -> str:
        self.asked += 1
        if self.asked == 1:
            raise ConnectionAbortedError
        return super().receive_bucket(**arguments)


def test_a_push_that_no_server_took_is_followed_by_one_in_a_new_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_group, "BROADCAST_SECONDS", 2.0)
    server = engine(workers=1)
    server.workers = [Unreachable(server.model, 0, 1)]
    with serving(server) as url:
        one = sampler(url)
        with pytest.raises(UserError, match="no server took the new weights"):
            push(one, 8)
        assert push(one, 9) == [True] and has_weights(server, 9) and joined(server) == 2


class Deaf(Worker):
    """A worker that joins no group."""

    def join_group(self, **_: Any) -> str:
        return "connection refused"


def test_a_group_that_cannot_be_formed_ends_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_group, "BROADCAST_SECONDS", 2.0)
    server = engine()
    server.workers[1] = Deaf(server.model, 1, 2)
    with serving(server) as url, pytest.raises(UserError, match=r"weight_transfer: nccl failed .* to disk"):
        push(sampler(url), 8)
    assert not server.paused


def test_nccl_is_refused_on_the_trainers_gpu_and_with_another_version_of_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_group, "device_name", lambda _: "GPU-0")
    monkeypatch.setattr(weight_group, "nccl_version", lambda _: "2.27.5")
    gpu = torch.device("cuda")
    weight_group._check_nccl(gpu, [{"device": "GPU-1", "nccl": "2.27.5"}])
    with pytest.raises(UserError, match="needs a GPU for each vLLM worker and another one"):
        weight_group._check_nccl(gpu, [{"device": "GPU-0", "nccl": "2.27.5"}])
    with pytest.raises(UserError, match=r"has NCCL 2\.28\.3 and this process 2\.27\.5"):
        weight_group._check_nccl(gpu, [{"device": "GPU-1", "nccl": "2.28.3"}])


def test_a_stage_and_an_evaluation_broadcast_their_weights(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = engine()
        url = stack.enter_context(serving(server))
        chosen = (*SETS, f"policy.servers={url}")
        steps = ("warmup.steps=3", "warmup.learning_rate=0.01", "warmup.critic_warmup_steps=0")
        made = stage(tmp_path, "warmup", *chosen, *steps)
        assert run_stage(made, episode).stopped == ""
        records = [json.loads(line) for line in (made.out / "metrics.jsonl").read_text().splitlines()]
        # Only a sampler with the newest weights agrees with the trainer to rounding.
        assert max(record["sampler_difference"] for record in records) < 1e-4
        empty: dict[str, Any] = {"dataset": "", "code": "", "params": {}, "figures": {}}
        policy, tokenizer = tiny_policy(seed=8), tiny_tokenizer()
        save_checkpoint(tmp_path / "policy", policy, tokenizer, stage="agentic", parent=None, **empty)
        open_sampler(params(*chosen), tmp_path / "policy", tokenizer, version="digest")
        assert has_weights(server, 8)


class Stuck(Worker):
    """A worker that says that it has joined, and does not take part."""

    def join_group(self, **_: Any) -> str:
        return ""


def test_a_group_whose_connection_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits in one call without a limit, as the group here does."""
    monkeypatch.setattr(weight_group, "BROADCAST_SECONDS", 1.0)
    never = threading.Event()
    monkeypatch.setattr(weight_group, "BroadcastGroup", lambda *_: never.wait())
    server = engine()
    server.workers = [Stuck(server.model, rank, 2) for rank in range(2)]
    with serving(server) as url, pytest.raises(UserError, match="this process has waited for them for 2 s"):
        push(sampler(url), 8)
    never.set()
    assert not server.paused


def test_a_worker_in_the_middle_of_an_update_is_known_by_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In vLLM its parameters are on the meta device then."""
    worker = Worker(tiny_policy(seed=3), 0, 1)
    worker.device = torch.device("cuda:1")
    worker.model.held = {name: value.to("meta") for name, value in worker.model.held.items()}
    made: list[torch.device] = []
    monkeypatch.setattr(worker_module, "TCPStore", lambda *_, **__: None)
    monkeypatch.setattr(
        worker_module, "BroadcastGroup", lambda _name, _store, device, *_: made.append(device)
    )
    monkeypatch.setattr(worker_module, "device_name", str)
    monkeypatch.setattr(worker_module, "nccl_version", lambda device: f"of {device.type}")
    assert worker.join_group("name", "localhost", 1, "nccl", 1, 2, 1.0) == "" and made == [worker.device]
    facts = worker.expect_weights()
    assert (facts["device"], facts["nccl"]) == ("cuda:1", "of cuda")
