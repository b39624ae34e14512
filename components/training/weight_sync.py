"""Samplers of a policy in training, which are given the new weights after each update."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.files import atomic_folder
from components.core.params import Params
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
    """Return the sampler of `policy` for the backend that policy.backend names; only rank 0 samples.

    `policy` was loaded from `checkpoint`, whose digest is `digest`. `out` is the stage's folder. The engine
    that trains `policy` must be made only after this call, because it may shard the weights, which the
    sampler may copy here.
    """
    if params.policy.backend == "transformers":
        return InProcessSampler(policy, tokenizer, params, digest)
    sampler = open_vllm_sampler(params, checkpoint, tokenizer, version=digest) if world.rank == 0 else None
    return SyncedSampler(policy, sampler, digest, out)


class InProcessSampler:
    """Sampler that uses transformers in this process.

    The sampler uses the trained weights themselves, so publishing an update only changes the version. Under
    ZeRO 3, which shards the weights, the sampler has a full copy of the weights, which `publish` updates.
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
        """Do nothing; this sampler keeps its memory while the policy is trained."""


class SyncedSampler:
    """Sampler that uses vLLM, to which rank 0 sends the weights after every update.

    `sampler` is None on the other ranks, which only help to gather the weights.
    """

    def __init__(self, policy: PreTrainedModel, sampler: VllmSampler | None, digest: str, out: Path):
        self.policy = policy
        self.sampler = sampler
        self.digest = digest
        # Folder for a checkpoint of the newest weights, used if policy.weight_transfer is disk.
        self.folder = out / "published"

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
    """Return the name by which trajectories refer to the weights that sampled them.

    It consists of the first digits of the digest of the checkpoint that the stage started from and the number
    of training steps since, such as 0123456789abcdef+3.
    """
    return f"{digest[:16]}+{updates}"
