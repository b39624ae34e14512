"""The weights of all servers of a fleet, which are replaced together by a push.

A fleet is several vLLM servers with the same model. New weights are sent in buckets, which are dictionaries
of complete tensors by name. A push from memory calls vLLM's routes in this order: pause, start, one update
for each bucket, finish, resume. The update is vLLM's own for memory of the same device, or a call of the
workers, which receive the broadcast of the bucket (`weight_group`). In a push by disk, the servers load a
checkpoint between pause and resume. A server that fails during a push is left out of the rest of the push,
and no prompt is sent to this server until a later push to it succeeds. Servers that are known not to answer
(`Replica.doubted`) are left out from the beginning, unless this is so of all servers.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from components.core.errors import UserError
from components.core.files import locked, user_cache
from components.policy.vllm.fleet import Fleet
from components.policy.vllm.replica import Replica
from components.policy.vllm.server_client import ServerUnavailable
from components.policy.vllm.weight_group import WeightGroup
from components.policy.vllm.worker import MODULUS, device_name, fingerprint, named_fingerprint

# Longest time for which a refused call is repeated, and the pause between two attempts, in seconds.
REFUSED_SECONDS, PAUSE_SECONDS = 60.0, 0.5

T = TypeVar("T")


class FleetWeights:
    """Interface with which the weights of all vLLM servers of a fleet are replaced.

    Such a replacement is called a push. `targets` are the servers that take part in the present push.
    """

    def __init__(self, fleet: Fleet, transfer: Literal["ipc", "nccl", "disk"]):
        """Prepare to replace the weights of the servers of `fleet` without contacting them.

        `transfer` is the parameter `policy.weight_transfer`: "ipc" for memory of the same device, "nccl" for
        a broadcast, or "disk" for a checkpoint that the servers load.
        """
        self.fleet, self.transfer = fleet, transfer
        self.targets: list[Replica] = []
        self.group = WeightGroup(self._each)

    def push(
        self, buckets: Iterable[Mapping[str, Tensor]], *, version: str, folder: Path | None, pause: str
    ) -> None:
        """Replace the weights of the servers by those of `buckets`, and check that every worker has them.

        A worker is the process of vLLM that computes on one GPU. Servers that do not answer are left out.
        `buckets` are dictionaries of complete tensors by name. With the transfer by disk, the servers load
        the checkpoint `folder`, which has the same weights. `version` is the name of the new weights, and
        `pause` the parameter `policy.push_pause`, which says whether running requests are kept, aborted or
        awaited. Another process of this user that pushes to one of the servers is waited for. Raises
        UserError if a server answers but has other weights, or if no server answers.
        """
        with contextlib.ExitStack() as locks:
            for url in sorted({replica.server.url for replica in self.fleet.replicas}):
                locks.enter_context(locked(user_cache("pushes") / quote(url, safe="")))
            self._push(buckets, version, folder, pause)

    def _push(
        self, buckets: Iterable[Mapping[str, Tensor]], version: str, folder: Path | None, pause: str
    ) -> None:
        try:
            workers = self._begin(pause)
            sent = Sent(getattr(torch, workers[0]["dtype"]))
            devices = sorted({worker["device"] for worker in workers})
            if self.transfer != "disk":
                self._start()
            self.group.check(workers)
            for number, bucket in enumerate(buckets):
                weights = [
                    (name, value.detach().to(sent.dtype).contiguous()) for name, value in bucket.items()
                ]
                sent.add(weights)
                if self.transfer == "ipc":
                    self._send(weights, devices)
                elif self.transfer == "nccl":
                    self.group.send(number, weights, self.targets, workers)
            if self.transfer == "disk":
                assert folder is not None, "a transfer by disk needs the folder"
                self._reload(str(folder.resolve()), version)
            else:
                self._each(
                    lambda replica: replica.server.call(
                        "POST", "/finish_weight_update", {"weight_version": version}
                    )
                )
            self._end(version, sent)
        finally:
            targets, self.targets = self.targets, []
            self._post(targets, "/resume")

    def _begin(self, pause: str) -> list[dict[str, Any]]:
        """Pause the servers that take part in a push of new weights, and return facts about each worker.

        A worker is the process of vLLM that computes on one GPU. Its dictionary has the keys `dtype`, such as
        "bfloat16", `device`, the UUID of the GPU or "cpu", `nccl`, the version of NCCL or "", and `group`,
        the name of the process group in which it receives weights or "". `pause` says what happens to running
        completions: "keep", "abort" or "wait". Servers that are known not to answer do not take part unless
        this is so of all, and neither do servers that fail now. Raises UserError if a server's workers lack
        the extension `worker.Fingerprint`, if a server has several engines, or if no server answers.
        """
        # The fleet asks doubted servers again and again, so they are left out here unless all are doubted.
        self.targets = [
            replica for replica in self.fleet.replicas if not replica.doubted
        ] or self.fleet.replicas.copy()
        for replica in self.fleet.replicas:
            replica.outdated = replica.outdated or replica not in self.targets
            replica.restarted = False

        async def prepare(replica: Replica) -> list[dict[str, Any]]:
            server = replica.server
            await server.open()
            await server.call("POST", f"/pause?mode={pause}&clear_cache=true")
            try:
                found = await server.workers("expect_weights")
            except ServerUnavailable as error:
                if error.status == 500 and "expect_weights" in str(error):
                    raise UserError(
                        f"policy.servers: the workers of {server.url} lack the extension that checks "
                        "weights; start the server with cuda-agent fleet."
                    ) from None
                raise
            if int((await server.call("GET", "/get_world_size"))["world_size"]) != len(found):
                raise UserError(
                    f"policy.servers: {server.url} has several engines (--data-parallel-size), of which only "
                    "one could be checked; start one server for each."
                )
            replica.workers = len(found)
            return found

        return [worker for workers in self._each(prepare) for worker in workers]

    def _start(self) -> None:
        """Begin an update by vLLM's weight transfer engine on all servers that take part in the push.

        A push replaces the weights of the servers. An update that a killed training process has left
        unfinished, or that has failed, is finished first. Raises UserError if no server is left that answers.
        """

        async def start(replica: Replica) -> None:
            call = replica.server.call
            if self.transfer == "ipc":
                await call("POST", "/init_weight_transfer_engine", {"init_info": {}})
            is_unfinished = replica.outdated
            try:
                await call("POST", "/start_weight_update", {"is_checkpoint_format": True})
            except ServerUnavailable as error:
                if error.status != 500:
                    raise
                is_unfinished = True
            if is_unfinished:
                # vLLM's layers may hold parts of that update, which would be mixed with those of this one.
                # All weights are sent again after it.
                await call("POST", "/finish_weight_update", {})
                await call("POST", "/start_weight_update", {"is_checkpoint_format": True})

        self._each(start)

    def _send(self, weights: Sequence[tuple[str, Tensor]], devices: Sequence[str]) -> None:
        """Send one bucket of weights to all workers, which read it from the memory of their own device.

        A worker is the process of vLLM that computes on one GPU, and a bucket is a group of complete tensors.
        `weights` are pairs of name and tensor. `devices` are the devices of the workers: UUIDs of GPUs, or
        "cpu". Raises UserError if this process cannot use one of them, or if no server is left that answers.
        """
        own = weights[0][1].device
        gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        seen = {device_name(device): device for device in (gpus if own.type == "cuda" else [own])}
        if missing := [name for name in devices if name not in seen]:
            raise UserError(
                f"policy.weight_transfer: a vLLM worker is on the device {missing[0]}, which this process "
                "does not see; set CUDA_VISIBLE_DEVICES to the GPUs of all workers too, or choose disk."
            )
        copies = [[value.to(seen[name]) for _, value in weights] for name in devices]

        async def update(replica: Replica) -> None:
            # A memory handle can be opened only once, so each server gets its own.
            info = {
                "names": [name for name, _ in weights],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
                "shapes": [list(tensor.shape) for _, tensor in weights],
                "ipc_handles_pickled": ipc_handles(copies),
            }
            await replica.server.call("POST", "/update_weights", {"update_info": info})

        self._each(update)
        if own.type == "cuda":
            # This frees the memory of tensors that vLLM's processes have released.
            torch.cuda.ipc_collect()

    def _reload(self, folder: str, version: str) -> None:
        """Have every server in the push of weights load the checkpoint in `folder`.

        `version` is the name of its weights. Raises UserError if no server is left that answers.
        """

        async def load(replica: Replica) -> None:
            await replica.server.workers("reload_weights", {"weights_path": folder})
            if replica.server.names_versions:
                await replica.server.call("POST", "/update_weight_version", {"new_version": version})

        self._each(load)

    def _end(self, version: str, sent: Sent) -> None:
        """Check that every server in the push has the weights `sent`, and mark servers that do as usable.

        A push replaces the weights of the servers. `version` is the name of the new weights, which
        trajectories record. Raises UserError if a server answers but has other weights, or if no server
        answers.
        """

        async def end(replica: Replica) -> None:
            reports = await replica.server.workers("weight_report")
            if problem := sent.fault(reports):
                replica.outdated = True
                raise UserError(
                    f"policy.servers: {replica.server.url} does not hold the weights that were sent to it "
                    f"({problem}); if another command uses it too, give each a server of its own, otherwise "
                    "restart it with the model that is trained, and run the same command again."
                )
            # The cached keys and values were computed with the old weights.
            await replica.server.call("POST", "/reset_prefix_cache")
            replica.weights, replica.version = reports, version
            replica.outdated = False
            replica.doubt(False)

        self._each(end)

    def set_asleep(self, asleep: bool) -> None:
        """Release the GPU memory of all usable servers if `asleep` is true, or else allocate it again.

        A server is usable if it answers and has the newest weights.
        """
        self._post(
            [replica for replica in self.fleet.replicas if replica.is_usable()],
            "/sleep?level=1" if asleep else "/wake_up",
        )

    def _post(self, replicas: Sequence[Replica], route: str) -> None:
        """Make a POST request to `route` of each server at the same time.

        If a server fails, no error is raised, but the server gets no prompts until it is found to work.
        """

        async def post(replica: Replica) -> None:
            try:
                await replica.server.call("POST", route)
            except (ServerUnavailable, UserError):
                replica.doubt(True)

        self.fleet.all(replicas, post)

    def _each(self, call: Callable[[Replica], Awaitable[T]]) -> list[T]:
        """Make a call for each of `targets` at the same time, and return the results of those that succeed.

        `targets` are the servers that take part in the present push of weights. A call that a server refuses
        because it is busy (status 429 or 503) is repeated for REFUSED_SECONDS. Servers whose call raises
        ServerUnavailable otherwise are removed from `targets`, and get no prompts until a later push to them
        succeeds. Raises UserError if no server is left, or if a call raises it.
        """
        failed: dict[Replica, ServerUnavailable] = {}

        async def patient(replica: Replica) -> list[T]:
            deadline = time.monotonic() + REFUSED_SECONDS
            while True:
                try:
                    return [await call(replica)]
                except ServerUnavailable as error:
                    if error.status in (429, 503) and time.monotonic() < deadline:
                        await asyncio.sleep(PAUSE_SECONDS)
                        continue
                    replica.exclude()
                    if error.status == 0:
                        replica.doubt(True)
                    failed[replica] = error
                    return []

        found = self.fleet.all(self.targets, patient)
        self.targets = [replica for replica in self.targets if replica not in failed]
        if not self.targets:
            error = next(iter(failed.values()))
            raise UserError(
                f"policy.servers: no server took the new weights ({error}); start them with cuda-agent "
                "fleet, then run the same command again."
            ) from error
        return [result for results in found for result in results]


class Sent:
    """The fingerprints of all weights that were sent to vLLM so far in a push, after a cast to its dtype.

    A fingerprint is a number that identifies the values of tensors (`worker.fingerprint`). The attribute
    `values` is the fingerprint of the values alone, and `named` one that also depends on the names.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.values = self.named = 0

    def add(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            values = fingerprint(tensor, self.dtype)
            self.values = (self.values + values) % MODULUS
            self.named = (self.named + named_fingerprint(name, values)) % MODULUS

    def fault(self, reports: Sequence[Mapping[str, Any]]) -> str:
        """Return a phrase that says how one server's weights differ from those sent, or "" if they do not.

        `reports` has what `weight_report` (`worker.Fingerprint`) returned for each worker of the server,
        which is the process of vLLM on one GPU. Every worker must have received all weights. The parameters
        of all workers together must also have the values that were sent: a parameter that is equal in all
        workers counts once, and of any other parameter, each worker has a part. This is not checked if
        several workers have copies of the same key and value heads.
        """
        for number, report in enumerate(reports):
            if report["received"] != self.named:
                return f"worker {number} received other weights"
        if reports[0]["key_value_copies"] > 1:
            return ""
        total = 0
        for name in {name for report in reports for name in report["parameters"]}:
            values = [report["parameters"][name] for report in reports if name in report["parameters"]]
            total += values[0] if len(set(values)) == 1 else sum(values)
        return "" if total % MODULUS == self.values else "its parameters have other values"


def ipc_handles(copies: Iterable[Sequence[Tensor]]) -> str:
    """Return the pickled memory handles in the `update_info` of vLLM's ipc backend, in base64.

    With a handle, another process can open the memory of a tensor. `copies` has the same tensors on each
    device that a worker of vLLM uses. The caller must keep the tensors alive until the workers have finished.
    """
    shared = [
        {device_name(copy.device): reduce_tensor(copy)[1] for copy in copies_of_one}
        for copies_of_one in zip(*copies, strict=True)
    ]
    return base64.b64encode(bytes(ForkingPickler.dumps(shared))).decode()
