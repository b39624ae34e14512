"""A fleet of vLLM servers: sessions keep their server, survive its death, and see the newest weights only."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_fixtures import free_port, request, sessions
from training_fixtures import params, tiny_policy, tiny_tokenizer
from vllm_double import Engine, serving

from components.core.config import PROJECT
from components.core.errors import UserError
from components.policy.sampler import Completion
from components.policy.vllm.fleet import Fleet
from components.policy.vllm.sampler import VllmSampler
from components.policy.weight_stream import weight_buckets

CONTEXT = 128
VERSIONS = ("0.24.0", "0.33.0")


def engine(version: str = "0.33.0", workers: int = 1) -> Engine:
    return Engine(tiny_policy(seed=3), tiny_tokenizer(), CONTEXT, version=version, workers=workers)


@contextmanager
def fleet_of(*engines: Engine, patience: float = 20.0, loyal: float = 30.0) -> Iterator[Fleet]:
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(one)) for one in engines]
        fleet = Fleet(urls, context=CONTEXT, version="v0", patience=patience, loyal=loyal)
        yield fleet
        fleet.close()
        assert not fleet.thread.is_alive()


def sampler(fleet: Fleet, *sets: str) -> VllmSampler:
    settings = params("policy.backend=vllm-server", f"policy.context={CONTEXT}", *sets).policy
    return VllmSampler(fleet, (2,), settings, version="v0")


def test_a_server_that_answers_503_for_a_while_is_survived_and_keeps_its_sessions() -> None:
    busy = engine()
    with fleet_of(busy) as fleet:
        busy.refused = 6
        found = asyncio.run(sessions(fleet, 3, 2))
        assert all(completion.ids for turns in found for completion in turns)
        figures = fleet.figures()
        assert figures["sampler_retries"] >= 3 and figures["sampler_moves"] == 0


def test_a_session_leaves_a_server_that_refuses_for_long() -> None:
    busy, idle = engine(), engine()
    with fleet_of(busy, idle, loyal=0.5) as fleet:
        first = asyncio.run(sessions(fleet, 2, 1))
        busy.refused = 10_000
        again = asyncio.run(sessions(fleet, 2, 1))
        assert [[c.ids for c in turns] for turns in first] == [[c.ids for c in turns] for turns in again]
        assert fleet.figures()["sampler_moves"] == 1


def test_patience_ends_with_one_sentence_that_a_flow_retries() -> None:
    busy = engine()
    with fleet_of(busy, patience=0.5) as fleet:
        busy.refused = 10_000
        with pytest.raises(UserError, match="no server has completed a request") as raised:
            asyncio.run(sessions(fleet, 1, 1))
        assert isinstance(raised.value.__cause__, ConnectionError)


def test_a_request_that_can_never_succeed_is_refused_at_once() -> None:
    with fleet_of(engine()) as fleet:
        with pytest.raises(UserError, match="maximum context length is 128"):
            asyncio.run(fleet.complete(request([1] * 127, 9), "s"))
        assert fleet.figures()["sampler_retries"] == 0


def test_a_cancelled_completion_is_aborted_at_the_server() -> None:
    slow = engine()
    slow.token_seconds = 0.2
    with fleet_of(slow) as fleet:

        async def run() -> None:
            task = asyncio.create_task(fleet.complete(request([1, 3, 4], 40), "s"))
            while not slow.running:
                await asyncio.sleep(0.01)
            task.cancel()
            while not slow.aborted:
                await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(run(), 10))


def test_the_capacity_is_what_the_caches_hold_and_grows_with_use() -> None:
    one, other = engine(), engine()
    one.blocks, other.blocks = 4 * CONTEXT // 16, 2 * CONTEXT // 16
    with fleet_of(one, other) as fleet:
        assert fleet.capacity() == 6

        async def run() -> None:
            while fleet.capacity() == 6:
                await sessions(fleet, 6, 2)

        asyncio.run(asyncio.wait_for(run(), 300))


def test_sessions_stay_where_their_prefix_is_cached() -> None:
    one, other = engine(), engine()
    with fleet_of(one, other) as fleet:
        asyncio.run(sessions(fleet, 8, 6, tokens=12))
        fleet.all(fleet.replicas, lambda replica: fleet._read_load(replica))
        # Only whole blocks of 16 tokens are cached, and each prompt has at most 92 tokens.
        assert fleet.figures()["sampler_prefix_hits"] > 0.5
        assert one.queries > 0 and other.queries > 0, "sessions are divided"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("transfer", ["ipc", "disk"])
def test_equal_weights_reach_two_workers_of_two_servers(version: str, transfer: str, tmp_path: Path) -> None:
    engines = [engine(version, workers=2), engine(version, workers=2)]
    trained = tiny_policy(seed=8)
    trained.save_pretrained(tmp_path / "new")
    with fleet_of(*engines) as fleet:
        one = sampler(fleet, f"policy.weight_transfer={transfer}")
        for number in (1, 2):
            buckets = weight_buckets(trained, 10_000)
            one.push(buckets, version=f"v{number}", folder=tmp_path / "new")
        for each in engines:
            for name, parameter in each.model.named_parameters():
                assert torch.equal(parameter, trained.get_parameter(name)), name
            assert version == "0.24.0" or each.label == "v2"
            assert not each.paused


@pytest.mark.parametrize("weights", ["new", "equal"])
def test_a_worker_that_keeps_its_old_weights_is_noticed(weights: str) -> None:
    stale = engine(workers=2)
    with fleet_of(engine(workers=2), stale) as fleet:
        one = sampler(fleet)
        stale.workers[1].model.loses_updates = True
        if weights == "equal":
            one.push(weight_buckets(tiny_policy(seed=3), 10_000), version="v1")
        else:
            with pytest.raises(UserError, match=r"does not hold .* \(its parameters have other values\)"):
                one.push(weight_buckets(tiny_policy(seed=8), 10_000), version="v1")
        assert not stale.paused, "sampling goes on after a failed push"


def test_an_examination_ends_no_pause_and_no_sleep() -> None:
    examined = engine()
    with fleet_of(examined) as fleet:
        sampler(fleet).push(weight_buckets(tiny_policy(seed=3), 10_000), version="v1")
        examined.paused, examined.asleep = "keep", True
        examined.workers[0].asleep = True
        fleet.all(fleet.replicas[:1], lambda replica: fleet._examine(replica, time.monotonic()))
        assert examined.paused == "keep" and examined.asleep and fleet.replicas[0].is_usable()
        examined.paused, examined.asleep = "", False


def test_a_dead_address_stops_no_start_and_its_server_serves_after_the_first_push(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port, later = free_port(), engine()
    with serving(engine()) as url:
        fleet = Fleet([f"http://127.0.0.1:{port}", url], context=CONTEXT, version="v0")
        assert "1 of 2 servers cannot be used (no vLLM server answers at" in caplog.text
        assert fleet.figures()["samplers_up"] == 1
        one = sampler(fleet)
        one.push(weight_buckets(tiny_policy(seed=8), 10_000), version="v1")
        asyncio.run(sessions(fleet, 2, 1))
        with serving(later, port=port):
            deadline = time.monotonic() + 30
            while fleet.replicas[0].doubted and time.monotonic() < deadline:
                time.sleep(0.05)
            asyncio.run(sessions(fleet, 8, 1))
            assert later.queries == 0, "it still has the weights with which it was started"
            one.push(weight_buckets(tiny_policy(seed=9), 10_000), version="v2")
            found = asyncio.run(sessions(fleet, 16, 1))  # eight of them are new
            assert later.queries > 0 and fleet.figures()["samplers_up"] == 2
            assert {name for (turn,) in found for name in turn.versions} == {"v2"}


def test_a_server_that_is_doubted_during_a_push_is_not_used_with_its_old_weights() -> None:
    with fleet_of(engine(), engine()) as fleet:
        one, missed = sampler(fleet), fleet.replicas[1]
        one.push(weight_buckets(tiny_policy(seed=8), 10_000), version="v1")
        missed.doubt(True)
        one.push(weight_buckets(tiny_policy(seed=9), 10_000), version="v2")
        fleet.all([missed], lambda replica: fleet._examine(replica, time.monotonic()))
        assert not missed.doubted and not missed.is_usable()
        one.push(weight_buckets(tiny_policy(seed=9), 10_000), version="v3")
        assert missed.is_usable()


class Lost(Engine):
    """An engine whose server closes the connection instead of sleeping."""

    def answer(self, route: str, query: dict[str, list[str]], body: Any, connection: Any) -> Any:
        if route == "/sleep":
            raise ConnectionAbortedError
        return super().answer(route, query, body, connection)


def test_a_server_that_is_lost_before_it_sleeps_does_not_end_the_stage() -> None:
    with fleet_of(engine(), Lost(tiny_policy(seed=3), tiny_tokenizer(), CONTEXT, version="0.33.0")) as fleet:
        sampler(fleet, "policy.sleep=true").sleep()
        assert [replica.is_usable() for replica in fleet.replicas] == [True, False]


def test_a_completion_that_a_push_interrupts_goes_on_with_the_new_weights() -> None:
    slow = engine()
    slow.token_seconds = 0.05
    with fleet_of(slow) as fleet:
        one = sampler(fleet, "policy.push_pause=abort")

        async def run() -> Completion:
            task = asyncio.create_task(
                one.complete([1, 3, 4], max_new_tokens=60, temperature=1.0, seed=5, session="s")
            )
            while not slow.running:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            buckets = weight_buckets(tiny_policy(seed=8), 10_000)
            await asyncio.to_thread(one.push, buckets, version="v1")
            slow.token_seconds = 0.0
            return await task

        found = asyncio.run(asyncio.wait_for(run(), 300))
        assert isinstance(found.versions, tuple) and len(found.versions) == len(found.ids)
        changed = found.versions.index("v1")
        assert changed > 0 and set(found.versions[:changed]) == {"default"}
        ids = torch.tensor([[1, 3, 4, *found.ids]])
        for model, part in ((tiny_policy(seed=3), slice(0, changed)), (slow.model, slice(changed, None))):
            with torch.no_grad():
                scores = torch.log_softmax(model(ids).logits[0].double(), -1)
            own = [float(scores[2 + place, token]) for place, token in enumerate(found.ids)]
            assert found.logprobs[part] == pytest.approx(own[part], abs=1e-5)


class Failing(Engine):
    """An engine that fails to load new weights while `fails` is true."""

    fails = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert not self.fails, "CUDA out of memory"
        super().update_weights(update_info)


def test_a_completion_on_a_server_that_fails_in_a_push_ends_on_another() -> None:
    failing = Failing(tiny_policy(seed=3), tiny_tokenizer(), CONTEXT, version="0.33.0")
    failing.token_seconds = 0.05
    other = engine()
    with fleet_of(failing, other) as fleet:
        one = sampler(fleet)

        async def run() -> Completion:
            task = asyncio.create_task(
                one.complete([1, 3, 4], max_new_tokens=60, temperature=1.0, seed=5, session="s")
            )
            while not failing.running:
                await asyncio.sleep(0.01)
            buckets = weight_buckets(tiny_policy(seed=8), 10_000)
            await asyncio.to_thread(one.push, buckets, version="v1")
            return await task

        found = asyncio.run(asyncio.wait_for(run(), 300))
        assert found.ids and failing.aborted == 1 and other.queries == 3
        failing.fails = False
        one.push(weight_buckets(tiny_policy(seed=9), 10_000), version="v2")
        assert all(replica.is_usable() for replica in fleet.replicas)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("transfer", ["ipc", "disk"])
def test_every_route_and_field_that_is_used_is_one_of_that_version(
    version: str, transfer: str, tmp_path: Path
) -> None:
    # Routes and fields of the classes in vLLM's wheels, see `vllm_contract.json`.
    facts = json.loads((PROJECT / "tests" / "data" / "vllm_contract.json").read_text())[version]
    used, trained = engine(version), tiny_policy(seed=8)
    trained.save_pretrained(tmp_path / "new")
    with fleet_of(used) as fleet:
        one = sampler(fleet, f"policy.weight_transfer={transfer}", "policy.sleep=true")
        one.sleep()
        one.push(weight_buckets(trained, 10_000), version="v1", folder=tmp_path / "new")
        (found,) = asyncio.run(sessions(fleet, 1, 1))[0]
        assert found.versions == ("v1",) * len(found.ids)
    assert set(used.calls) <= set(facts["routes"])
    for route, body in used.bodies:
        match route:
            case "/init_weight_transfer_engine":
                assert set(body["init_info"]) <= set(facts["ipc_init"])
            case "/update_weights":
                assert set(body["update_info"]) <= set(facts["ipc_update"])
            case "/v1/completions":
                assert set(body) <= set(facts["completion"])
            case "/inference/v1/generate":
                assert set(body) <= set(facts["generate"])
                assert set(body["sampling_params"]) <= set(facts["sampling"])
    if version != "0.24.0":
        read = {"token_ids", "logprobs", "finish_reason", "weight_versions"}
        assert read <= set(facts["choice"]) and set(facts["span"]) == {"version", "start", "end"}
