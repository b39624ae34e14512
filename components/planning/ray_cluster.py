"""Connection to a Ray cluster, and placement groups, which reserve resources of the cluster for a run.

A placement group is for the actors of one role of the run, such as judges, which measure kernels. Actors have
names that all processes of a run share, so that each process finds an actor that another process has started
instead of starting it again. Actors and placement groups end with the process that started them, also if that
is killed, because Ray ends what belongs to a driver that is gone.

A vLLM server is announced by an actor that does nothing, and whose name contains the server's address.

Ray is imported by this file, so only code that runs with a cluster imports it.
"""

import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from components.core.errors import UserError
from components.core.params import Params

NAMESPACE = "cuda-agent"
# Environment variable with the identifier of the run, which its child processes and ranks inherit.
RUN = "CUDA_AGENT_RAY_RUN"
# Longest wait for a connection to the address of a cluster.
CONNECT_SECONDS = 10.0
# Longest wait for GPUs that are in use. After a run was killed, Ray needs some seconds to end its actors.
RESERVE_SECONDS = 120.0
# Beginning of the names of the actors that announce vLLM servers.
ANNOUNCED = "vllm-server "


def connect() -> None:
    """Connect to the Ray cluster at the address RAY_ADDRESS, or on this machine if the variable is not set.

    Does nothing if this process is connected already. Also sets the environment variable CUDA_AGENT_RAY_RUN,
    the identifier of the run, to the id of the Ray job, if it is not set. Raises UserError if there is no
    such cluster.
    """
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "auto")
        handler = signal.getsignal(signal.SIGTERM)
        try:
            _check_listening(address)
            ray.init(address=address, log_to_driver=False, namespace=NAMESPACE)
        except OSError as error:
            raise UserError(
                f"RAY_ADDRESS={address}: no Ray cluster answers there; start one (ray start --head), or use "
                "none: pool.trainers and pool.judges 0, addresses in policy.servers, no --announce."
            ) from error
        finally:
            # Ray's own handler would end the process with another exit code and without a sentence.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)
    os.environ.setdefault(RUN, ray.get_runtime_context().get_job_id())


def _check_listening(address: str) -> None:
    """Raise OSError if `address` is that of a cluster which has ended.

    Ray itself tries for minutes to reach a cluster that was killed and whose address it finds in its file.
    Addresses in other forms than HOST:PORT and `auto` are left to Ray.
    """
    if address == "auto":
        folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # as in Ray
        file = Path(folder) / "ray" / "ray_current_cluster"
        address = file.read_text().strip() if file.is_file() else ""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()


def name_in_run(name: str) -> str:
    """Return the name by which all processes of this run find the actor `name` in the Ray cluster.

    It begins with the identifier of the run, so that no run finds an actor of another run. `connect` must
    have been called in this process or in one that started it; KeyError is raised otherwise.
    """
    return f"{os.environ[RUN]}-{name}"


def bundle(params: Params) -> dict[str, float]:
    """Return the amount of each Ray resource that one trainer or judge takes, such as {"CPU": 1.0}.

    A judge measures kernels. Every amount is 1. The names are "CPU", "GPU" if `device` is cuda, and the value
    of `pool.resource` if that is not empty.
    """
    names = ("CPU", "GPU" if params.device == "cuda" else "", params.pool.resource)
    return dict.fromkeys(filter(None, names), 1.0)


def check_capacity(params: Params) -> None:
    """Raise UserError unless there is a Ray cluster that has the resources of all trainers and judges.

    Their numbers are `pool.trainers` and `pool.judges`, and `bundle` says what each takes. Resources count
    also if they are in use.
    """
    connect()
    pool = params.pool
    there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]  # not annotated
    wanted = pool.trainers + pool.judges
    for resource, each in bundle(params).items():
        if there.get(resource, 0.0) < wanted * each:
            raise UserError(
                f"pool: {pool.trainers} trainers and {pool.judges} judges need {wanted} {resource}, and the "
                f"Ray cluster has {there.get(resource, 0.0):g}; add nodes, or lower pool.trainers or "
                "pool.judges."
            )


def reserve(params: Params, role: str, count: int) -> PlacementGroup:
    """Return a placement group that reserves the resources of `count` actors, each of them those of `bundle`.

    `role` says what the actors do. It is the parameter in the section `pool` that gives `count`, such as
    `judges`. The group ends with this process. Raises UserError if the resources are not free within
    RESERVE_SECONDS.
    """
    each = bundle(params)
    # No code looks the group up by its name, which is for people who list the groups of the cluster.
    name = f"{name_in_run(role)}-{secrets.token_hex(4)}"
    group: PlacementGroup = placement_group([each] * count, strategy="PACK", name=name)
    if not group.wait(RESERVE_SECONDS):
        remove_placement_group(group)
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]  # not annotated
        raise UserError(
            f"pool.{role}: {count} need "
            + " and ".join(f"{count} {name} ({free.get(name, 0.0):g} free)" for name in each)
            + "; wait for the other run on the Ray cluster to end, add nodes, or lower the number."
        )
    return group


class _Announcement:
    """An actor without methods, whose name announces the address of a vLLM server."""


@contextmanager
def announcing(urls: Sequence[str]) -> Iterator[None]:
    """Return a context in which every process on the cluster finds the vLLM servers at `urls` (`announced`).

    The servers are announced by Ray actors, which end with the context. Raises UserError if there is no
    cluster.
    """
    connect()
    actor: Any = ray.remote(num_cpus=0)(_Announcement)
    held = [actor.options(name=f"{ANNOUNCED}{secrets.token_hex(4)} {url}").remote() for url in urls]
    try:
        yield
    finally:
        for handle in held:
            ray.kill(handle)


def announced() -> list[str]:
    """Return the addresses of the vLLM servers that are announced on the cluster, sorted.

    Raises UserError if there is no cluster.
    """
    connect()
    actors: list[dict[str, str]] = list_named_actors(all_namespaces=True)
    return sorted(
        {
            actor["name"].split()[-1]
            for actor in actors
            if actor["namespace"] == NAMESPACE and actor["name"].startswith(ANNOUNCED)
        }
    )
