"""Parameters of the cold start, of the training stages and of their engine.

The cold start is the supervised training on demonstrations before the first training stage. The engine is
DeepSpeed. The class `Params` in params.py includes these parameters. The description of each field gives its
meaning and its unit.
"""

from typing import Annotated, Literal

from pydantic import Field

from components.core.records import (
    Count,
    FrozenModel,
    Minutes,
    Natural,
    Positive,
    Seed,
    Share,
    result,
    throughput,
)


class Coldstart(FrozenModel):
    """Parameters of the cold start, which trains a policy from scratch, or fine-tunes a language model.

    The cold start comes before the training stages, and its training data are demonstrations.
    """

    language_model: bool = result(
        "whether a language model that policy.source names is fine-tuned before stage 1; it needs a much "
        "lower learning rate than a policy from scratch"
    )
    demonstrations: Count | str = result(
        "demonstrations written by the rule-based kernel writer; for a language model also a folder of "
        "trajectories to learn from"
    )
    steps: Count = result("optimizer steps")
    tokens_per_step: Count = result("tokens of one optimizer step")
    learning_rate: Positive = result(
        "peak learning rate of AdamW: of a language model, or of embeddings and norms from scratch"
    )
    matrix_learning_rate: Positive = result("peak learning rate of Muon (matrices of a policy from scratch)")
    wrong_share: Share = result("share of demonstrations that are deliberately wrong")
    multi_turn_share: Share = result("share of demonstrations with a measurement and a second attempt")
    seed: Seed = result("seed of demonstrations, initial weights and order")


class Rollouts(FrozenModel):
    """Parameters of the sampling of trajectories, which are attempts of the policy at kernel tasks."""

    tasks: Count = result("tasks of one step")
    samples: Count = result("trajectories per task")
    temperature: Positive = result("sampling temperature; 1 keeps sampler and trainer comparable")
    max_turns: Count = result("turns of one trajectory; the paper uses 150 in training")
    max_new_tokens: Count = result("tokens of one turn")


class Ppo(FrozenModel):
    """Parameters of a PPO stage, the training stage `warmup` (single-turn) or `agentic` (multi-turn)."""

    steps: Count = result("updates of this stage")
    learning_rate: Positive = result("actor's learning rate; the paper uses 3e-6")
    critic_learning_rate: Positive = result("critic's learning rate; the paper uses 6e-6")
    critic_warmup_steps: Natural = result("first steps that train the critic only")
    learning_rate_warmup_steps: Natural = result("steps of linear warm-up of the actor's learning rate")
    minibatches: Count = result("optimizer steps per batch; the paper uses 1")
    epochs: Count = result("passes over a batch")
    gamma: Share = result("discount; the paper uses 1")
    lam: Share = result("lambda of the actor's advantages; the paper uses 0.95")
    critic_lam: Share = result("lambda of the critic's targets; 1 is Monte Carlo, the paper uses 0.95")
    clip_low: Share = result("lower clip; the paper uses 0.2")
    clip_high: Share = result("upper clip; the paper uses 0.28")
    importance_cap: Positive = result("cap of the truncated importance weights between sampler and trainer")
    advantages: Literal["critic", "group"] = result(
        "critic: generalised advantage estimation; group: the reward less the mean of the task's "
        "other samples, without a critic"
    )
    whiten: bool = result("whiten advantages over the batch")
    gradient_clip: Positive = result("largest gradient norm")
    kl_coefficient: Annotated[float, Field(ge=0)] = result(
        "weight of the KL penalty to the stage's first policy; 0 is off, as in the paper"
    )
    measure_kl: bool = result(
        "compute the KL divergence from the stage's first policy also if kl_coefficient is 0; it "
        "takes a second copy of the weights unless policy.adapter is used"
    )
    max_entropy: Positive = result(
        "a policy whose entropy passes this many nats has collapsed: the stage stops itself"
    )
    min_entropy: Annotated[float, Field(ge=0)] = result(
        "a policy whose entropy falls below this many nats has collapsed; 0 is off"
    )
    max_truncated: Share = result("a stage whose length-clipped share passes this has collapsed")
    min_effective_share: Share = result(
        "lowest effective sample size of the importance weights between sampler and trainer, "
        "as a share of the tokens"
    )
    min_explained_variance: float | None = result(
        "the stage stops when the critic explains less on three steps in a row; null is off"
    )
    min_updates: Natural = result(
        "the stage fails if the rewards were not all equal in fewer steps than this, so that it has hardly "
        "updated the policy; 0 is off"
    )
    checkpoint_every: Count | Minutes = throughput(
        "steps between resumable states, or the least time between them, such as 20min"
    )
    staleness: Natural = result(
        "steps by which the weights that sampled a token may be older than those that are "
        "trained; 0 samples and trains in turn, more samples while the policy is trained"
    )
    rollouts: Rollouts = Field(description="how trajectories are sampled")


class Rejection(FrozenModel):
    """Parameters of rejection fine-tuning: supervised training on sampled trajectories with enough reward."""

    rollouts: Rollouts = Field(description="how trajectories are sampled")
    min_reward: float = result("keep trajectories whose reward is greater than this; the paper uses 0")
    min_kept: Natural = result("the stage fails if it keeps fewer trajectories than this; 0 is off")
    per_task: Count = result("kept trajectories per task")
    epochs: Count = result("passes of supervised fine-tuning over the kept trajectories")
    batch: Count = result("trajectories of one optimizer step")
    learning_rate: Positive = result("peak learning rate, decayed linearly to zero")
    replay_share: Share = result("share of cold-start demonstrations mixed in, against forgetting")

    @property
    def replayed(self) -> int:
        """Return how many of the `batch` trajectories in a full batch are demonstrations of the cold start.

        The number is `batch` times `replay_share`, rounded to an integer. The cold start is the supervised
        training before the training stages.
        """
        return round(self.batch * self.replay_share)


class Critic(FrozenModel):
    """Parameters of value pretraining, which trains the critic on trajectories before multi-turn PPO."""

    epochs: Count = result("passes over the trajectories")
    batch: Count = result("trajectories of one optimizer step")
    learning_rate: Positive = result("peak learning rate")
    lam: Share = result("lambda of the targets; 1 is Monte Carlo, the paper uses 0.95")
    held_out_share: Share = result("share of tasks held out to measure the explained variance")
    min_explained_variance: float = result(
        "the stage fails when the held-out explained variance is below this"
    )


class Engine(FrozenModel):
    """Parameters of the training engine, DeepSpeed: precision, use of memory, and division among ranks."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = throughput("DeepSpeed ZeRO stage")
    dtype: Literal["float32", "bfloat16"] = result("precision of the trained weights")
    tokens_per_microbatch: Count = throughput(
        "tokens of one forward pass; rows are packed to it, and a longer row has one of its own"
    )
    sequence_parallel: Annotated[int, Field(ge=1, le=8)] = throughput(
        "ranks that divide the tokens of a forward pass among them (Ulysses, arXiv 2309.14509)"
    )
    mlp_tokens: Natural = throughput(
        "tokens that a feed-forward layer computes at once; 0 is all of the forward pass"
    )
    activation_checkpointing: bool = throughput("recompute activations in the backward pass")
    activation_offload: bool = throughput(
        "keep the inputs of the layers in host memory until the backward pass"
    )
    compile: bool = throughput("compile the layers with torch.compile, in bfloat16 on one GPU for each rank")
    cpu_offload: bool = throughput("keep the optimizer state in host memory")
    reference_offload: bool = throughput(
        "keep the parameters of the stage's first policy, for the KL divergence, in host memory"
    )
    collective_seconds: Positive = throughput(
        "longest wait of a rank for the others; rank 0 samples while they wait"
    )
