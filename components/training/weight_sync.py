"""Sampling backends of a policy in training, and how the weights of each update reach them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.config import Params
from components.core.files import atomic_folder
from components.policy.backends import open_vllm_sampler
from components.policy.sampler import Sampler
from components.policy.vllm_sampler import VllmSampler
from components.training.engine import DeepSpeedEngine, World

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def open_policy_sampler(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    params: Params,
    world: World,
    *,
    checkpoint: Path,
    digest: str,
    out: Path,
) -> InProcessSampler | SyncedSampler:
    """Return the sampler of `policy` that policy.backend names; rank 0 samples.

    `policy` was loaded from `checkpoint`. Call this before the engine that trains it is made.
    """
    settings = params.policy
    if settings.backend == "transformers":
        return InProcessSampler(policy, tokenizer, params, digest)
    if world.rank > 0:
        return SyncedSampler(policy, None, digest, out)
    sampler = open_vllm_sampler(params, checkpoint, tokenizer, version=digest)
    return SyncedSampler(policy, sampler, digest, out)


class InProcessSampler:
    """Sampler with transformers in this process.

    It shares the trained weights, so publishing an update only changes the version. ZeRO 3 shards the
    weights, so there it holds a copy that each update is copied into.
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

    def publish(self, engine: DeepSpeedEngine, updates: int) -> Sampler:
        if self.model is not self.policy:
            with engine.gathered_parameters():
                self.model.load_state_dict(self.policy.state_dict())
        self.model.eval()
        self.sampler.version = version(self.digest, updates)
        return self.sampler

    def sleep(self) -> None:
        """Do nothing: the weights are those that are trained."""


class SyncedSampler:
    """Sampler with vLLM, to which rank 0 sends every update's weights."""

    def __init__(self, policy: PreTrainedModel, sampler: VllmSampler | None, digest: str, out: Path):
        self.policy = policy
        self.sampler = sampler
        self.digest = digest
        self.folder = out / "published"
        """Checkpoint of the newest weights, for policy.weight_transfer = disk."""

    def publish(self, engine: DeepSpeedEngine, updates: int) -> Sampler | None:
        with engine.gathered_parameters():
            if self.sampler is not None:
                if self.sampler.settings.weight_transfer == "disk":
                    with atomic_folder(self.folder) as temporary:
                        self.policy.save_pretrained(temporary)
                weights = list(self.policy.named_parameters())
                self.sampler.push(weights, version=version(self.digest, updates), folder=self.folder)
        return self.sampler

    def sleep(self) -> None:
        if self.sampler is not None:
            self.sampler.sleep()


def version(digest: str, updates: int) -> str:
    """Return the name of weights in trajectories: the stage's first checkpoint and the updates since."""
    return f"{digest[:16]}+{updates}"
