"""Reinforcement learning of a kernel writer in one file: sample, judge, advantage, loss, step, evaluation.

    python docs/examples/one_loop.py [--policy FOLDER] [--tasks 4] [--samples 6] [--steps 3] [--seed 0]

It takes about a minute on two processor cores. Without --policy, a small transformer is made and taught from
demonstrations first. A folder is a checkpoint with the compact prompt, such as one that a run with the
profile smoke wrote. This is stage 1 of the pipeline with the project's own parts and without an orchestrator.
Left out are:

- several turns, tools and the full prompt: an answer is one call of Write (components/agent/episode.py);
- the critic: an answer's advantage is its reward less the mean reward of the other answers to its task;
- DeepSpeed, vLLM, micro-batches and packed sequences: there is one process and one batch, so an update of a
  large model would not fit (components/training/engine.py);
- several updates on the same answers, with which the clip would take effect, and the penalty for divergence;
- torch.compile as a baseline, whose start takes seconds for each task, so the highest reward is 2;
- held-out tasks: the figures at the end are those of the tasks that were trained on;
- checkpoints and resumption (components/training/training_loop.py).
"""

import argparse
import random
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from components.agent.chat_template import ChatTemplate
from components.agent.workspace import Workspace
from components.bootstrap.cold_start import loss_sum, new_model, optimizers
from components.bootstrap.demonstrations import make_demonstration
from components.bootstrap.tokenizer import encode_conversations, train_tokenizer
from components.core.config import resolve
from components.core.params import Params
from components.core.task import KernelTask
from components.evaluation.metrics import summarise
from components.evaluation.results import TaskResult
from components.judge.judge import Judge
from components.judge.verdict import Verdict, milestone
from components.policy.checkpoint import load_model, load_tokenizer
from components.policy.prompts import user_message
from components.policy.sampler import Completion, complete_all
from components.policy.transformers_sampler import TransformersSampler
from components.synthesis.core_composer import compose_training_tasks
from components.training.advantages import leave_one_out
from components.training.losses import policy_loss_sum

# Demonstrations of each task, steps of the supervised fine-tuning, and demonstrations in one step.
DEMONSTRATIONS, TEACHING_STEPS, TEACHING_BATCH = 40, 80, 16
LEARNING_RATE = 3e-4
MAX_NEW_TOKENS = 192
# PPO's loss has no gradient where new and old probability differ by more than 1 - 0.2 or 1 + 0.28.
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
SETTINGS = (
    # Demonstrations of one turn, a third of them with a mistake, so that there is something to learn.
    "coldstart.multi_turn_share=0",
    "coldstart.wrong_share=0.3",
    "data.operator_mix={1: 0.5, 2: 0.5}",
)


@dataclass(frozen=True)
class Answer:
    """A sampled answer to a task: the token ids of prompt and answer, the verdict and the reward."""

    task: KernelTask
    prompt: list[int]
    completion: Completion
    verdict: Verdict
    reward: float


def admitted_tasks(params: Params, judge: Judge) -> Iterator[KernelTask]:
    """Yield tasks that the judge can measure, with the evidence that the first files of a workspace need."""
    for task in compose_training_tasks(params.seed, params.data, params.device):
        admission = judge.admit(task.code, params.data.eager_seconds)
        if admission.admitted:
            yield task.model_copy(update={"evidence": admission.evidence})


def padded(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tensor, Tensor]:
    """Return token ids and action masks as two tensors [rows, tokens], padded on the right with zeros."""
    ids = pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)
    return ids, pad_sequence([torch.tensor(mask) for _, mask in rows], batch_first=True)


def taught_policy(
    params: Params, tasks: Sequence[KernelTask]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a new transformer after supervised fine-tuning on demonstrations of the tasks."""
    rng = random.Random(params.seed)
    demonstrations = [
        make_demonstration(task, rng, params.coldstart, params.device)
        for task in tasks
        for _ in range(DEMONSTRATIONS)
    ]
    messages = [message for demonstration in demonstrations for message in demonstration]
    tokenizer = train_tokenizer(messages, params.policy.vocabulary, params.policy.context)
    rows = list(encode_conversations(tokenizer, demonstrations))
    model = new_model(params, len(tokenizer), tokenizer).train()
    pair = optimizers(model, params)  # Muon for the matrices, AdamW for the rest
    for step in range(TEACHING_STEPS):
        ids, mask = padded(rng.sample(rows, TEACHING_BATCH))
        loss = loss_sum(model, ids, mask.bool()) / mask[:, 1:].sum()
        model.zero_grad()
        loss.backward()
        for optimizer in pair:
            optimizer.step()
        if step % 20 == 19:
            print(
                f"teaching {step + 1} of {TEACHING_STEPS}: loss {loss.item():.3f} nats per token", flush=True
            )
    return model, tokenizer


def sample_answers(
    params: Params,
    judge: Judge,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[KernelTask],
    *,
    temperature: float,
    seed: int,
) -> list[Answer]:
    """Sample an answer for each entry of `tasks`, and have the judge build, check and measure them all."""
    template = ChatTemplate(tokenizer, described=False)
    prompts = [
        template.first_ids(user_message(params.policy, task.code, in_turns=False, device=params.device))
        for task in tasks
    ]
    sampler = TransformersSampler(
        model, tokenizer, batch=params.policy.batch, device=params.device, version=""
    )
    completions = complete_all(
        sampler, prompts, max_new_tokens=MAX_NEW_TOKENS, temperature=temperature, seed=seed
    )

    def judged(task: KernelTask, prompt: list[int], completion: Completion) -> Answer:
        workspace = Workspace(task)
        for call in template.read(prompt, completion.ids)[1]:
            path = workspace.writable(str(call.arguments.get("file_path", "")))
            if call.name == "Write" and path is not None:
                workspace.files[path] = str(call.arguments.get("content", ""))
        verdict = judge.verdict(task, workspace.files, compare_compile=None)
        return Answer(task, prompt, completion, verdict, float(milestone(verdict)))

    # Candidates are built in parallel, and the judge measures one at a time.
    with ThreadPoolExecutor(params.sandbox.build_workers) as threads:
        return list(threads.map(judged, tasks, prompts, completions))


def mean_policy_loss(model: PreTrainedModel, answers: Sequence[Answer]) -> Tensor:
    """Return PPO's policy loss, a mean over the sampled tokens, with leave-one-out advantages."""
    advantages = torch.tensor(
        leave_one_out([answer.reward for answer in answers], [answer.task.task_id for answer in answers])
    )
    rows = [(answer.prompt, answer.completion.ids) for answer in answers]
    ids, mask = padded([([*prompt, *own], [0] * len(prompt) + [1] * len(own)) for prompt, own in rows])
    logprobs = model(ids).logits[:, :-1].log_softmax(-1)  # [rows, tokens - 1, vocabulary]
    actor_logprob = logprobs.gather(2, ids[:, 1:, None])[:, :, 0]  # [rows, tokens - 1]
    loss, _ = policy_loss_sum(
        actor_logprob,
        actor_logprob.detach(),  # The answers were sampled from these very weights.
        advantages[:, None].expand_as(actor_logprob),
        mask[:, 1:],
        CLIP_LOW,
        CLIP_HIGH,
    )
    return loss / mask.sum()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", type=Path, help="folder of a checkpoint to begin with")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--samples", type=int, default=6, help="answers to each task in one step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    params = resolve("ci", (*SETTINGS, f"seed={options.seed}")).params

    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(params, Path(folder))
        try:
            tasks = list(islice(admitted_tasks(params, judge), options.tasks))
            print(f"{len(tasks)} tasks: {'; '.join(', '.join(task.ops) for task in tasks)}", flush=True)
            if options.policy is None:
                model, tokenizer = taught_policy(params, tasks)
            else:
                model = load_model(options.policy, dtype="float32", device=params.device)
                tokenizer = load_tokenizer(options.policy)
            start = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
            repeated = [task for task in tasks for _ in range(options.samples)]
            for step in range(options.steps):
                answers = sample_answers(
                    params, judge, model, tokenizer, repeated, temperature=1.0, seed=options.seed + step
                )
                loss = mean_policy_loss(model.train(), answers)
                optimizer.zero_grad()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                reward = sum(answer.reward for answer in answers) / len(answers)
                correct = sum(answer.verdict.status == "correct" for answer in answers)
                print(
                    f"step {step + 1} of {options.steps}: {correct} of {len(answers)} answers correct, "
                    f"mean reward {reward:.3f}, gradient norm {norm:.3f}",
                    flush=True,
                )
            pairs = zip(model.parameters(), start, strict=True)
            distance = sum(float((now.detach() - before).square().sum()) for now, before in pairs) ** 0.5
            print(f"the weights moved by {distance:.4f}")
            final = sample_answers(params, judge, model, tokenizer, tasks, temperature=0.0, seed=0)
            summary = summarise(
                [
                    TaskResult(
                        task_id=answer.task.task_id,
                        status=answer.verdict.status,
                        speedup=answer.verdict.speedup,
                    )
                    for answer in final
                ]
            )
            print(
                f"evaluation: {summary.correct} of {summary.tasks} tasks correct, "
                f"{summary.faster_rate.eager:.0%} faster than eager PyTorch"
            )
        finally:
            judge.close()


if __name__ == "__main__":
    main()
