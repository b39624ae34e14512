"""Supervised fine-tuning: the cold start of a language model, and the update of stage 2 (rejection.py).

The model learns to predict the assistant's tokens of given conversations. A cold start is the fine-tuning of
a language model before stage 1. Its conversations are demonstrations of mixed quality by the rule-based
kernel writer (bootstrap/kernel_writer.py), or the trajectories of another policy. Both are encoded with the
model's own chat template.

`select` chooses the trajectories to learn from. A trajectory is kept if its reward is above
rejection.min_reward, if it was not cut off at the length limit, if it has no redundant or invalid tool calls
(CUDA Agent paper, section 4.2), and if no trajectory before it that is kept has the same tokens. Only the
best rejection.per_task trajectories of each task are kept, because easy tasks would dominate otherwise.
"""

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from components.agent.chat_template import ChatTemplate
from components.agent.episode import first_prompt
from components.agent.trajectory import Trajectory, load_trajectories
from components.bootstrap.cold_start import schedule
from components.bootstrap.corpus import load_corpus, store_corpus, write_conversations
from components.bootstrap.demonstrations import make_demonstration
from components.bootstrap.operator_chain import BY_NAME
from components.bootstrap.tokenizer import Message
from components.core.errors import UserError
from components.core.files import digest_bytes, digest_json
from components.core.params import Params
from components.core.stage_params import Rejection
from components.core.task import KernelTask
from components.policy.checkpoint import load_tokenizer, verify_checkpoint
from components.policy.prompts import IN_TURNS, user_message
from components.synthesis.core_composer import compose_training_tasks
from components.training.batches import Packed, Streams, make_batch
from components.training.engine import DeepSpeedEngine, MetricSums, train_step
from components.training.networks import Actor, load_policy
from components.training.stage import Stage, StageResult
from components.training.training_loop import FitEnd, StepRecord, TrainState, finish, fit, resume

# Token ids and action mask of a trajectory or demonstration.
Row = tuple[Sequence[int], Sequence[int]]
# Folder of the tokenised conversations of a cold start, in the stage's folder.
CORPUS = "corpus"
# Probability that a composed chain with no, one or two operators over whole rows is demonstrated.
DEMONSTRATED = (0.2, 0.4, 1.0)
# Largest gradient norm of a cold start, and time between two of its states.
GRADIENT_CLIP, SAVE_EVERY = 1.0, "2min"


def fine_tune(
    stage: Stage,
    actor: DeepSpeedEngine,
    steps: int,
    rows: Callable[[int], Sequence[Row]],
    learning_rate: Callable[[int], float],
    *,
    save_every: int | str,
) -> tuple[TrainState, FitEnd]:
    """Take `steps` optimizer steps, the step i on `rows(i)` with `learning_rate(i)`.

    A row is a pair of token ids and action mask, which is 1 on the tokens to learn. `actor` is the engine of
    an Actor. The stage continues from its newest state, which has the weights and the optimizer state after a
    step; a state is saved every `save_every` steps, or minutes if it is a text such as "2min". Returns the
    stage's TrainState and how the training ended. The metrics of a step are "loss" (nats per token to learn),
    "gradient_norm" (before clipping), "learning_rate", "seconds_update" and "tokens_per_second_update".
    Raises NotFinite if loss or gradient is not finite, and Terminated after SIGTERM.
    """

    def tuning_step(step: int, record: StepRecord) -> None:
        batch, sums = make_batch(rows(step)), MetricSums()
        rate = learning_rate(step)
        norm = train_step(
            actor, batch, Streams(), range(len(batch.ids)), likelihood_loss, sums, learning_rate=rate
        )
        record.figures |= sums.means(actor.world, batch.tokens) | {
            "gradient_norm": norm,
            "learning_rate": rate,
        }
        record.end_phase("update", sum(batch.lengths))

    state = resume(stage, {"actor": actor})
    return state, fit(state, steps, tuning_step, shown=("loss",), save_every=save_every)


def likelihood_loss(network: nn.Module, packed: Packed, _: Streams) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negative log-likelihood (nats), and the same value as the metric "loss".

    It is summed over the tokens of `packed` whose action mask is 1. `network` is an Actor.
    """
    logprob, _ = network(packed)
    total = -logprob.sum()
    return total, {"loss": total}


def run(stage: Stage) -> StageResult:
    """Run the cold start of a language model: fine-tune the checkpoint `stage.actor` on conversations.

    The conversations are demonstrations by the rule-based kernel writer, or the trajectories in the folder
    that the parameter coldstart.demonstrations names. The first rank makes them, encodes them as token ids
    and stores them for all ranks. The result has the folder of the new checkpoint. Raises UserError if
    coldstart.demonstrations is a folder without a trajectory to learn from, or if no conversation fits into
    policy.context tokens.
    """
    started, params, settings = time.monotonic(), stage.params, stage.params.coldstart
    verify_checkpoint(stage.actor, params.device)
    model = load_policy(stage.actor, params)
    actor = DeepSpeedEngine(
        Actor(model, 1.0), params.engine, device=params.device, gradient_clip=GRADIENT_CLIP
    )
    folder = stage.out / CORPUS
    if actor.world.rank == 0 and not folder.is_dir():
        tokenizer = load_tokenizer(stage.actor)
        store_corpus(_conversations(stage, tokenizer), tokenizer, params.policy.context, folder)
    actor.world.barrier()
    corpus = load_corpus(folder)
    ids: Any = corpus.ids.numpy()
    mask: Any = corpus.action_mask.numpy()
    bounds = corpus.offsets.tolist()
    steps = plan_steps(
        corpus.offsets.diff().tolist(), settings.steps, settings.tokens_per_step, settings.seed
    )

    def rows(step: int) -> list[Row]:
        spans = (slice(bounds[index], bounds[index + 1]) for index in steps[step])
        return [(ids[span], mask[span]) for span in spans]

    state, end = fine_tune(
        stage,
        actor,
        len(steps),
        rows,
        lambda step: settings.learning_rate * schedule(step, len(steps)),
        save_every=SAVE_EVERY,
    )
    return finish(
        state,
        model,
        corpus.tokenizer,
        started=started,
        figures={
            "steps": float(len(steps)),
            "conversations": float(len(bounds) - 1),
            "loss": state.metrics.mean("loss", slice(-1, None)),
        },
        end=end,
    )


def plan_steps(lengths: Sequence[int], steps: int, tokens_per_step: int, seed: int) -> list[list[int]]:
    """Return the conversations of each of `steps` steps, as indices into `lengths`.

    `lengths` has the number of tokens of each conversation. A step gets conversations until they have at
    least `tokens_per_step` tokens. They are drawn in passes over all conversations, and each pass has a
    random order that depends on `seed`.
    """
    rng, tokens = random.Random(seed), 0
    planned: list[list[int]] = [[]]
    while len(planned) <= steps:
        for index in rng.sample(range(len(lengths)), len(lengths)):
            planned[-1].append(index)
            tokens += lengths[index]
            if tokens >= tokens_per_step:
                planned.append([])
                tokens = 0
    return planned[:steps]


def _conversations(stage: Stage, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Return token ids and action mask of each conversation that a cold start learns from.

    A cold start is the fine-tuning of a language model before stage 1. The conversations are demonstrations
    by the rule-based kernel writer, or the trajectories of the folder that coldstart.demonstrations names.
    The mask is 1 on the assistant's tokens.
    """
    params = stage.params
    if isinstance(params.coldstart.demonstrations, str):
        return _of_trajectories(params, tokenizer)
    tasks = demonstrated_tasks(params, params.coldstart.seed)
    return encode(params, tokenizer, write_conversations(params, tasks, stage.progress))


def demonstrated_tasks(params: Params, seed: int) -> Iterator[KernelTask]:
    """Yield tasks for demonstrations, which are composed with `seed`, without end.

    One in twenty of the chains that are composed of core operators has two operators over whole rows, such as
    a norm and a softmax, which a language model does not learn from so few. So chains are left out such that
    it is one in six.
    """
    rng = random.Random(seed)
    for task in compose_training_tasks(seed, params.data, params.device):
        rows = sum(name in BY_NAME and BY_NAME[name].kind in ("row", "reduction") for name in task.ops)
        if params.data.operators == "kernelbench" or rng.random() < DEMONSTRATED[rows]:
            yield task


def demonstrations(params: Params, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Row]:
    """Return token ids and action mask of `count` conversations such as the cold start learns from.

    If coldstart.demonstrations is a folder, the conversations are drawn from its trajectories with
    replacement, and UserError is raised if it has none to learn from. Otherwise they are written by the
    rule-based kernel writer for tasks that are composed with another seed than the tasks of the cold start.
    Equal counts give equal conversations.
    """
    rng = random.Random(params.coldstart.seed)
    if isinstance(params.coldstart.demonstrations, str):
        return rng.choices(_of_trajectories(params, tokenizer), k=count)
    # With another seed the tasks differ from the tasks of the cold start.
    tasks = demonstrated_tasks(params, params.coldstart.seed + 1)
    return encode(
        params,
        tokenizer,
        [
            make_demonstration(task, rng, params.coldstart, params.device)
            for task in itertools.islice(tasks, count)
        ],
    )


def encode(
    params: Params, tokenizer: PreTrainedTokenizerBase, conversations: Sequence[list[Message]]
) -> list[Row]:
    """Return each conversation as the token ids of an episode with these messages, and their action masks.

    A message has a role and a content. The content of a conversation's first message is the source of a task,
    followed by the text IN_TURNS if the conversation has several turns. It is replaced by the prompt that an
    episode of `params.policy` has for this task. The mask is 1 on the tokens of the assistant's messages.
    """
    template = ChatTemplate(tokenizer, described=params.policy.prompt == "full")
    rows: list[Row] = []
    for task, *turns in conversations:
        code, in_turns = task["content"].removesuffix(IN_TURNS), task["content"].endswith(IN_TURNS)
        content = user_message(params.policy, code, in_turns=in_turns, device=params.device)
        rows.append(template.conversation_ids([{"role": "user", "content": content}, *turns]))
    return rows


def _of_trajectories(params: Params, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Return the trajectories in the folder coldstart.demonstrations that are good enough to learn from.

    They are those that `select` keeps, as in rejection fine-tuning (stage 2), among those on which the judge,
    which measures kernels, did not fail. Each is a pair of token ids and action mask. The texts of a
    trajectory are encoded with `tokenizer`, because its stored ids may be those of another policy's
    tokenizer. Raises UserError if none is kept.
    """
    folder = str(params.coldstart.demonstrations)
    kept, reasons = select(
        [trajectory for trajectory in load_trajectories(Path(folder)) if trajectory.is_judged],
        params.rejection,
    )
    if not kept:
        found = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
        raise UserError(
            f"coldstart.demonstrations: {folder} has no trajectory to learn from ({found or 'none'} judged); "
            "give another folder, or lower rejection.min_reward."
        )
    template = ChatTemplate(tokenizer, described=params.policy.prompt == "full")
    return [template.conversation_ids(_messages(params, trajectory)) for trajectory in kept]


def _messages(params: Params, trajectory: Trajectory) -> list[Message]:
    """Return the messages of a trajectory, dictionaries with role and content, up to the policy's last turn.

    The roles are user for the prompt, assistant for the policy's turns and tool for observations.
    """
    messages = [
        {
            "role": "user",
            "content": first_prompt(params, trajectory.task, in_turns=trajectory.settings["in_turns"]),
        }
    ]
    for turn in trajectory.turns:
        messages.append({"role": "assistant", "content": turn.text})
        messages += [{"role": "tool", "content": call.observation} for call in turn.calls]
    while messages[-1]["role"] == "tool":
        del messages[-1]
    return messages


def select(trajectories: Sequence[Trajectory], rejection: Rejection) -> tuple[list[Trajectory], Counter[str]]:
    """Return the trajectories to learn from, in their given order, and the number of trajectories by outcome.

    A trajectory is rejected for its `rejection_reason`, if an earlier one that was not rejected has the
    same content (`_content`), or if its task has rejection.per_task better ones: with a higher reward,
    then a higher speed-up, then fewer tokens. The outcome is "kept" or the reason of the rejection: that
    of `rejection_reason`, such as "low_reward", or "duplicate" or "over_task_limit".
    """
    reasons: Counter[str] = Counter(kept=0)
    kept: dict[str, Trajectory] = {}  # by content
    for trajectory in trajectories:
        content = _content(trajectory)
        reason = rejection_reason(trajectory, rejection) or ("duplicate" if content in kept else "")
        if reason:
            reasons[reason] += 1
        else:
            kept[content] = trajectory
    per_task: Counter[str] = Counter()
    for one in sorted(kept.values(), key=lambda one: (-one.earned, -_speedup(one), len(one.ids))):
        per_task[one.task_id] += 1
        if per_task[one.task_id] > rejection.per_task:
            reasons["over_task_limit"] += 1
            del kept[_content(one)]
    reasons["kept"] = len(kept)
    return list(kept.values()), reasons


def _content(trajectory: Trajectory) -> str:
    """Return a digest of the tokens of a trajectory, or of its task and texts if it is of a chat server.

    Trajectories of a chat server have no token ids.
    """
    if len(trajectory.ids):
        return digest_bytes(bytes(trajectory.ids))
    return digest_json([trajectory.task_id, *(turn.text for turn in trajectory.turns)])


def rejection_reason(trajectory: Trajectory, rejection: Rejection) -> str:
    """Return the first reason why a trajectory is rejected, or "" if it may be learned from.

    The reasons are low_reward (at most rejection.min_reward), length_clipped (cut off at the length limit),
    invalid_call (a tool call that is not valid) and redundant_call (`has_loop`).
    """
    calls = [call for turn in trajectory.turns for call in turn.calls]
    reasons = {
        "low_reward": trajectory.earned <= rejection.min_reward,
        "length_clipped": trajectory.finish_reason == "length",
        "invalid_call": any(not call.valid for call in calls),
        # In ASCII, because the arguments of a call that is not valid may have what UTF-8 cannot represent.
        "redundant_call": has_loop([json.dumps([one.name, one.arguments], sort_keys=True) for one in calls]),
    }
    return next((reason for reason, is_found in reasons.items() if is_found), "")


def has_loop(calls: Sequence[str]) -> bool:
    """Return whether a call is repeated and no call was made for the first time in between.

    `calls` are the tool calls of a trajectory (name and arguments) as texts, in order.
    """
    latest_new = 0
    last: dict[str, int] = {}
    for index, call in enumerate(calls):
        if call not in last:
            latest_new = index
        elif latest_new <= last[call]:
            return True
        last[call] = index
    return False


def _speedup(trajectory: Trajectory) -> float:
    ratio = trajectory.final.speedup.eager
    return ratio.estimate if ratio is not None else 0.0
