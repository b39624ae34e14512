"""The vLLM servers that a process starts for itself if the parameter `policy.servers` is empty."""

import atexit
import contextlib
import contextvars
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from components.core.errors import StageFailed, UserError, refuse
from components.core.params import Params
from components.core.reaper import start_reaper
from components.policy.vllm.start import (
    POLL_SECONDS,
    START_SECONDS,
    find_vllm,
    is_healthy,
    launches,
    running,
)

# Entries of a model's configuration that say how its weights were stored, and not what it computes.
STORAGE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
HOST = "127.0.0.1"
LOG = logging.getLogger(__name__)


def check_own_servers(params: Params) -> None:
    """Raise UserError if this process needs vLLM servers of its own and cannot start them.

    It needs them if `policy.backend` is vllm-server and `policy.servers` is empty. It cannot start them if
    `pool.trainers` is not 0, if there are too few GPUs, or if vLLM is not found.
    """
    policy, pool = params.policy, params.pool
    if policy.backend != "vllm-server" or policy.servers:
        return
    refuse(
        (
            pool.trainers,
            "policy.servers: is empty; give the addresses of vLLM servers, such as [http://127.0.0.1:8000], "
            "because a run starts servers of its own only if pool.trainers is 0.",
        ),
        (
            len(_gpus(params)) < max(1, pool.samplers),
            f"pool.samplers: {pool.samplers} servers need a GPU each, and each rank of the trainer one, but "
            f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES')}; name more GPUs, or lower it.",
        ),
    )
    find_vllm(policy.vllm)


def _gpus(params: Params) -> list[str]:
    """Return the names of the GPUs on which the servers are started, as in CUDA_VISIBLE_DEVICES.

    They are the `pool.samplers` GPUs after those of the trainer, which has one for each rank on this host. If
    `pool.samplers` is 0, the servers share the trainer's first GPU. There are fewer names if
    CUDA_VISIBLE_DEVICES names fewer GPUs.
    """
    count, ranks = params.pool.samplers, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = list(filter(None, map(str.strip, visible))) or [str(gpu) for gpu in range(count + ranks)]
    return names[ranks : ranks + count] if count else names[:1]


class OwnServers:
    """The vLLM servers of this process, which are started when they are first used.

    They are ended by `close`, or else at the end of the process, also if the process is killed.
    """

    def __init__(self) -> None:
        self.stack = contextlib.ExitStack()
        self.urls: list[str] = []
        # The configuration of the servers' model, and how they were started, without ports.
        self.served: Any = None
        # Why the servers are not started again any more, or None.
        self.fault: StageFailed | UserError | None = None

    def open(self, params: Params, model: Path) -> list[str]:
        """Return the addresses of servers that can hold the weights of the model in the folder `model`.

        If no servers run, they are started with this model. Servers that run already, with equal options and
        for a model of equal configuration, are returned as they are; others are ended first. So the servers
        may have other weights until a push replaces them. The log says that servers start, and how long it
        takes. A server that ends is started again. Raises UserError if a server cannot be started, and
        StageFailed if one that runs already has ended too often in a row.
        """
        # Imported here because the imports take seconds.
        from transformers import AutoConfig

        from components.planning.model_shapes import shapes_of
        from components.planning.role_memory import VLLM_SHARE, tensor_parallel

        check_own_servers(params)
        config, gpus, group = AutoConfig.from_pretrained(model), _gpus(params), 1
        if params.pool.samplers:
            group = min(tensor_parallel(params, shapes_of(config, str(model))) or 1, len(gpus))
            policy = params.policy.model_copy(update={"gpu_memory_share": VLLM_SHARE})
            params = params.model_copy(update={"policy": policy})
        plan = functools.partial(
            launches,
            params,
            vllm=find_vllm(params.policy.vllm),
            gpus=gpus,
            tensor_parallel=group,
            host=HOST,
            logs=Path(params.home).expanduser().resolve() / "vllm",
        )
        count = len(gpus) // group
        described = {name: value for name, value in config.to_dict().items() if name not in STORAGE}
        served = (described, plan(Path(), ports=[0] * count))
        if self.urls and served == self.served and self.fault is None:
            self.wait(all)
            return self.urls
        self.close()
        started = plan(model.resolve(), ports=_free_ports(count))
        start_reaper()
        LOG.info("%d vLLM servers start; their logs are in %s.", len(started), started[0].log.parent)
        watch = self.stack.enter_context(running(started, LOG.info))
        # In the context of the caller, with whose flow run the log is shown.
        target = functools.partial(contextvars.copy_context().run, self._watch, watch)
        threading.Thread(target=target, name="vllm-watch", daemon=True).start()
        self.urls, self.served = [launch.url for launch in started], served
        return self.urls

    def _watch(self, watch: Callable[[], None]) -> None:
        try:
            watch()
        except (StageFailed, UserError) as error:
            self.fault = error

    def wait(self, enough: Callable[[Iterable[bool]], bool]) -> bool:
        """Wait until `all` or `any` of the servers of `open` are healthy, and return whether they are.

        The wait ends after START_SECONDS. A server is not healthy while it is started again, for instance.
        If no server was started, the result is False. Raises the errors of `check`.
        """
        healthy, deadline = False, time.monotonic() + START_SECONDS
        while self.urls and not (healthy := enough(map(is_healthy, self.urls))):
            self.check()
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        return healthy

    def check(self) -> None:
        """Raise the error after which this process no longer restarts its vLLM servers, if there was one.

        It is StageFailed if a server has ended too often in a row, and UserError if the executable of vLLM
        could not be started.
        """
        if self.fault is not None:
            raise self.fault

    def close(self) -> None:
        """End the vLLM servers that `open` has started, if there are any."""
        self.urls = []
        self.stack.close()
        self.fault = None


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]


OWN_SERVERS = OwnServers()
atexit.register(OWN_SERVERS.close)
