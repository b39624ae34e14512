"""The broadcast of weights from the trainer to the workers of vLLM servers, by NCCL, or by gloo on a CPU.

A worker is the process of vLLM that computes on one GPU. The trainer is rank 0 of a process group that it
forms with all workers that take part in a push, which replaces their weights. The weights are sent in
buckets, which are groups of complete tensors. The workers are asked over HTTP to receive a bucket while the
trainer sends it. The group is kept between pushes, and is formed anew when a server joined, left or was
restarted.
"""

import ipaddress
import itertools
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any

import httpx
import torch
from torch import Tensor

# Public names that torch imports from its C++ module only where it was built with distributed support.
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from components.core.errors import UserError, refuse
from components.policy.vllm.replica import Replica
from components.policy.vllm.worker import BroadcastGroup, device_name, fault_of, nccl_version

# Longest time for which the ranks wait for each other to join the group, and longest time of the broadcast of
# one bucket, in seconds.
BROADCAST_SECONDS = 120.0

# A server with one result of each of its workers.
Answer = tuple[Replica, list[str]]


class WeightGroup:
    """The process group in which this process broadcasts weights to the workers of vLLM servers.

    `members` are the servers whose workers are in it. `name` is the name of the group, or of the group that
    is being formed.
    """

    def __init__(self, each: Callable[[Callable[[Replica], Awaitable[Answer]]], list[Answer]]):
        """Prepare broadcasts without forming a group.

        `each` makes a given call for each vLLM server that takes part in the present push of weights, and
        returns the results of those that succeed (`FleetWeights._each`).
        """
        self.each = each
        self.group: BroadcastGroup | None = None
        self.name = ""
        self.members: list[Replica] = []

    def check(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Leave the group if one of the workers is not in it, because its server was restarted for instance.

        A worker is the process of vLLM that computes on one GPU. `workers` has what
        `Fingerprint.expect_weights` returned for all workers, including the name of the group in which each
        of them is. If the group is left, the next `send` forms a new one.
        """
        if self.group is not None and any(worker["group"] != self.group.name for worker in workers):
            self._leave()

    def send(
        self,
        number: int,
        weights: Sequence[tuple[str, Tensor]],
        targets: Sequence[Replica],
        workers: Sequence[Mapping[str, Any]],
    ) -> None:
        """Broadcast the bucket `number`, from 0, of a push to all workers of `targets`.

        `weights` are pairs of name and tensor, and all tensors have the same dtype and device. `workers` has
        what `Fingerprint.expect_weights` returned for all workers of vLLM. If a server fails, the others get
        the bucket in a new group without it. Raises UserError if no server is left, if the broadcast fails
        although every server answers, or if NCCL cannot connect the workers.
        """
        tensors = [tensor for _, tensor in weights]
        bucket = {
            "number": number,
            "names": [name for name, _ in weights],
            "dtype": str(tensors[0].dtype).removeprefix("torch."),
            "shapes": [list(tensor.shape) for tensor in tensors],
        }

        def broadcast() -> None:
            assert self.group is not None, "the group is formed before"
            self.group.broadcast(tensors)

        sent, remaining = list[Replica](), list(targets)
        while sent != remaining:
            if self.members != remaining:
                remaining = self._join(remaining, tensors[0].device, workers)
            else:
                sent = remaining
                remaining = self._together(sent, broadcast, "receive_bucket", lambda _: bucket)

    def _join(
        self, targets: Sequence[Replica], device: torch.device, workers: Sequence[Mapping[str, Any]]
    ) -> list[Replica]:
        """Form a new group with the workers of `targets`, and return the servers that still answer.

        A worker is the process of vLLM that computes on one GPU. This process is rank 0 of the group and
        broadcasts from `device`. `workers` has what `Fingerprint.expect_weights` returned for all workers. If
        the result has fewer servers than `targets`, the group cannot be used. Raises UserError if NCCL cannot
        connect the workers (`_check_nccl`), if no server is left, or if forming the group fails although all
        servers answer.
        """
        self._leave()
        if device.type == "cuda":
            _check_nccl(device, workers)
        family, host = max(
            (_own_address(replica.server.url) for replica in targets),
            key=lambda found: not ipaddress.ip_address(found[1]).is_loopback,
        )
        listener = socket.create_server((host, 0), family=family)
        port, limit = listener.getsockname()[1], timedelta(seconds=BROADCAST_SECONDS)
        store = TCPStore(
            host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        *ranks, size = itertools.accumulate((replica.workers for replica in targets), initial=1)
        first = dict(zip(targets, ranks, strict=True))
        name = f"{host}:{port}"

        def join() -> None:
            group = BroadcastGroup(name, store, device, 0, size, BROADCAST_SECONDS)
            if self.name == name:
                self.group = group
            else:  # it took too long
                group.leave()

        group = {
            "name": name,
            "host": host,
            "port": port,
            "backend": "nccl" if device.type == "cuda" else "gloo",
            "size": size,
            "seconds": BROADCAST_SECONDS,
        }
        self.name, self.members = name, list(targets)
        return self._together(targets, join, "join_group", lambda replica: group | {"first": first[replica]})

    def _together(
        self,
        targets: Sequence[Replica],
        own: Callable[[], None],
        method: str,
        arguments: Callable[[Replica], dict[str, Any]],
    ) -> list[Replica]:
        """Call `own` in this process and a method of all workers at the same time; return who answered.

        The workers are those of the vLLM servers `targets`; each gets the keyword arguments
        `arguments(server)` for `method`. The result has the servers that answered. If `own` or a worker
        reports an error, the group is left; if all servers answered nevertheless, UserError is raised.
        UserError is also raised if no server is left.
        """

        async def call(replica: Replica) -> Answer:
            # A worker waits for the store and for the broadcast, and loads the weights.
            return replica, await replica.server.workers(method, arguments(replica), 3 * BROADCAST_SECONDS)

        # NCCL connects the ranks without a time limit, and cannot be interrupted meanwhile. So the servers'
        # answers are awaited here, and the own part in a thread that does not keep this process alive.
        done = Future[str]()

        def run() -> None:
            try:
                done.set_result(fault_of(own))
            except BaseException as error:
                done.set_exception(error)

        Thread(target=run, daemon=True, name="weights").start()
        try:
            answers = self.each(call)
        except UserError:
            self._leave()
            raise
        remaining = [replica for replica, _ in answers]
        faults = [fault for _, found in answers for fault in found]
        try:
            faults.append(done.result(2 * BROADCAST_SECONDS))
        except TimeoutError:
            faults.append(f"this process has waited for them for {2 * BROADCAST_SECONDS:.0f} s")
        if fault := next(filter(None, faults), ""):
            self._leave()
            if remaining == targets:
                raise UserError(
                    f"policy.weight_transfer: nccl failed although all vLLM servers answer ({fault}); see "
                    "that the servers' hosts can connect to this one, or set it to disk."
                )
        return remaining

    def _leave(self) -> None:
        if self.group is not None:
            self.group.leave()
        self.group, self.name, self.members = None, "", []


def _check_nccl(device: torch.device, workers: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError if NCCL would refuse a group of `device` and the workers.

    `workers` has the `device` (UUID of its GPU) and `nccl` (version) of each worker of vLLM. NCCL refuses two
    ranks on the same GPU, and ranks with different versions of NCCL.
    """
    gpus = [device_name(device), *(worker["device"] for worker in workers)]
    own = nccl_version(device)
    other = next((worker["nccl"] for worker in workers if worker["nccl"] != own), own)
    refuse(
        (
            len(set(gpus)) < len(gpus),
            "policy.weight_transfer: nccl needs a GPU for each vLLM worker and another one for the trainer; "
            "start the servers on other GPUs, or set it to ipc or disk.",
        ),
        (
            other != own,
            f"policy.weight_transfer: a vLLM worker has NCCL {other} and this process {own}, which do not "
            "connect; install the same version of nvidia-nccl in both environments, or set it to disk.",
        ),
    )


def _own_address(url: str) -> tuple[socket.AddressFamily, str]:
    """Return the address of this machine from which it reaches the server at `url`, and its family."""
    root = httpx.URL(url)
    family, kind, *_, address = socket.getaddrinfo(root.host, root.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # For a datagram socket this only chooses the route.
        probe.connect(address)
        return family, probe.getsockname()[0]
