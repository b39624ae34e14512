"""Samplers of a policy that is being trained: how each update's weights reach the backend that the parameters name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from components.core.config import Params
from components.core.files import atomic_folder
from components.policy.sampler import Sampler
from components.policy.vllm_local import LocalVllm
from components.policy.vllm_sampler import VllmSampler
from components.policy.vllm_server import VllmServer
from components.training.engine import Engine, World

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class PolicySampler(Protocol):
    """What a stage samples with."""

    def publish(self, engine: Engine, updates: int) -> Sampler | None:
        """The sampler of the weights after `updates` updates, on every rank at once; None on ranks that do not sample."""
        ...

    def rest(self) -> None:
        """Nothing is sampled until the next `publish`."""
        ...


def open_policy_sampler(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    params: Params,
    world: World,
    *,
    checkpoint: Path,
    digest: str,
    out: Path,
) -> PolicySampler:
    """A sampler of `policy`, which was loaded from `checkpoint`; make it before the engine that trains it. Rank 0 samples."""
    settings = params.policy
    if settings.backend == "transformers":
        return InProcessSampler(policy, tokenizer, params, digest)
    if world.rank > 0:
        return SyncedSampler(policy, None, digest, out)
    vllm = (
        VllmServer(settings.server)
        if settings.backend == "vllm-server"
        else LocalVllm(checkpoint, settings, dtype=params.engine.dtype, seed=params.seed)
    )
    return SyncedSampler(policy, VllmSampler(vllm, tokenizer, settings, version=digest), digest, out)


class InProcessSampler:
    """transformers, in this process.

    It shares the trained weights, so an update is published by a new version alone. ZeRO 3 shards the weights, so there
    it holds a copy that each update is copied into.
    """

    def __init__(
        self, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, params: Params, digest: str
    ):
        from components.policy.transformers_sampler import TransformersSampler

        self.policy = policy
        self.model = copy.deepcopy(policy) if params.engine.zero_stage == 3 else policy
        self.digest = digest
        self.sampler = TransformersSampler(
            self.model, tokenizer, batch=params.policy.batch, device=params.device, version=digest
        )

    def publish(self, engine: Engine, updates: int) -> Sampler:
        if self.model is not self.policy:
            with engine.whole():
                self.model.load_state_dict(self.policy.state_dict())
        self.model.eval()
        self.sampler.version = version(self.digest, updates)
        return self.sampler

    def rest(self) -> None:
        return


class SyncedSampler:
    """vLLM: every update's weights are sent to it, from rank 0."""

    def __init__(self, policy: PreTrainedModel, sampler: VllmSampler | None, digest: str, out: Path):
        self.policy = policy
        self.sampler = sampler
        self.digest = digest
        self.folder = out / "published"
        """For the transfer by disk: the newest weights as a checkpoint."""

    def publish(self, engine: Engine, updates: int) -> Sampler | None:
        with engine.whole():
            if self.sampler is not None:
                if self.sampler.settings.weight_transfer == "disk":
                    with atomic_folder(self.folder) as temporary:
                        self.policy.save_pretrained(temporary)
                self.sampler.push(
                    list(self.policy.named_parameters()),
                    version=version(self.digest, updates),
                    folder=self.folder,
                )
        return self.sampler

    def rest(self) -> None:
        if self.sampler is not None:
            self.sampler.sleep()


def version(digest: str, updates: int) -> str:
    """Names weights in trajectories: the checkpoint that the stage started from, and the updates since."""
    return f"{digest[:16]}+{updates}"
