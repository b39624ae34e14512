"""The agent's loop: many episodes side by side over one sampler and one judge pool.

All live episodes sample a turn together, then their calls run at the same time, then the next turn. Ids are appended and
never made again from text; the suffix that carries observations is what the chat template puts after a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from transformers import PreTrainedTokenizerBase

from components.agent.reward import milestone
from components.agent.tools import Tools, parse_calls
from components.agent.trajectory import ToolCall, Trajectory, Turn
from components.agent.workspace import Workspace
from components.config import Params
from components.policy.generate import Completion, Sampler
from components.policy.prompts import user_message
from components.sandbox.pool import Candidate, Job, JudgePool
from components.sandbox.verdict import Verdict
from components.task import KernelTask

MAX_PARALLEL_CALLS = 64
SMALLEST_TURN = 16
"""An episode ends when fewer tokens than this are left in the context window."""


def _nothing(done: int, total: int) -> None:
    return


def suffix_ids(tokenizer: PreTrainedTokenizerBase, observation: str) -> list[int]:
    """What stands between a sampled turn and the next one: the tool message and the generation prompt.

    Found as the difference of two renderings, so that any chat template serves that renders earlier messages alike.
    """
    opening = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    before = str(tokenizer.apply_chat_template(opening, tokenize=False))
    after = str(tokenizer.apply_chat_template([*opening, {"role": "tool", "content": observation}], tokenize=False, add_generation_prompt=True))
    end = before.rindex(str(tokenizer.eos_token)) + len(str(tokenizer.eos_token))
    if not after.startswith(before[:end]):
        raise ValueError("the chat template changes earlier messages when a tool message follows: token in, token out is impossible with it")
    return list(tokenizer.encode(after[end:], add_special_tokens=False))


class Episode:
    """One trajectory in the making."""

    def __init__(self, task: KernelTask, params: Params, tokenizer: PreTrainedTokenizerBase, pool: JudgePool, epoch: str, in_turns: bool):
        self.task = task
        self.tokenizer = tokenizer
        self.pool = pool
        self.epoch = epoch
        self.workspace = Workspace(task, params.device)
        self.tools = Tools(self.workspace, params.sandbox, self.judge)
        message = {"role": "user", "content": user_message(params.policy, task.code, in_turns=in_turns)}
        text = str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
        self.ids: list[int] = list(tokenizer.encode(text, add_special_tokens=False))
        self.mask = [0] * len(self.ids)
        self.logprobs = [0.0] * len(self.ids)
        self.turns: list[Turn] = []
        self.finish_reason = ""

    def judge(self) -> Verdict:
        """The verdict on the files as they are; equal files in one epoch are measured once."""
        return self.pool.submit(Job(self.task, Candidate.of(self.workspace.candidate()), self.epoch)).result()

    def take(self, completion: Completion) -> None:
        self.ids += completion.ids
        self.mask += [1] * len(completion.ids)
        self.logprobs += completion.logprobs

    def act(self, completion: Completion, last: bool) -> None:
        """Run the calls of a sampled turn and append their observations, or end the episode."""
        text = str(self.tokenizer.decode(list(completion.ids), skip_special_tokens=True))
        calls: tuple[ToolCall, ...] = tuple(self.tools.run(request) for request in parse_calls(text))
        self.turns.append(Turn(text, calls))
        if completion.finish_reason == "length":
            self.finish_reason = "length"
        elif not calls:
            self.finish_reason = "stop"
        elif last:
            self.finish_reason = "turns"
        else:
            suffix = suffix_ids(self.tokenizer, "\n".join(call.observation for call in calls))
            self.ids += suffix
            self.mask += [0] * len(suffix)
            self.logprobs += [0.0] * len(suffix)

    def finish(self, version: str) -> Trajectory:
        final = self.judge()
        return Trajectory(
            task_id=self.task.task_id,
            ids=tuple(self.ids),
            action_mask=tuple(self.mask),
            sampler_logprob=tuple(self.logprobs),
            turns=tuple(self.turns),
            verdicts=(*self.tools.verdicts, final),
            reward=float(milestone(final)),
            finish_reason=self.finish_reason,
            policy_version=version,
            files=self.workspace.candidate(),
        )


def run_episodes(
    tasks: Sequence[KernelTask],
    *,
    params: Params,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    pool: JudgePool,
    epoch: str,
    seed: int,
    max_turns: int,
    max_new_tokens: int,
    temperature: float,
    on_progress: Callable[[int, int], None] = _nothing,
) -> list[Trajectory]:
    """One trajectory per given task, in order; repeat a task to sample it several times.

    With `max_turns` 1 the first answer is final. `epoch` names the policy update: within it, equal candidates on a task
    share one measurement. The final answer is the state of the workspace when the episode ends. Raises nothing for what
    a policy does; an `infrastructure` verdict in `final` means that the trajectory says nothing about the policy.
    """
    episodes = [Episode(task, params, tokenizer, pool, epoch, max_turns > 1) for task in tasks]
    live = list(range(len(episodes)))
    with ThreadPoolExecutor(max_workers=MAX_PARALLEL_CALLS, thread_name_prefix="episode") as threads:
        for turn in range(max_turns):
            room = [min(max_new_tokens, params.policy.context - len(episodes[i].ids)) for i in live]
            for i in [i for i, tokens in zip(live, room, strict=True) if tokens < SMALLEST_TURN]:
                episodes[i].finish_reason = "length"
            live = [i for i in live if not episodes[i].finish_reason]
            if not live:
                break
            budget = min(max_new_tokens, *(params.policy.context - len(episodes[i].ids) for i in live))
            completions = sampler.generate([episodes[i].ids for i in live], max_new_tokens=budget, temperature=temperature, seed=seed * 1_000_003 + turn)
            for i, completion in zip(live, completions, strict=True):
                episodes[i].take(completion)
            last = turn + 1 == max_turns
            pending = [threads.submit(episodes[i].act, completion, last) for i, completion in zip(live, completions, strict=True)]
            for future in pending:
                future.result()
            live = [i for i in live if not episodes[i].finish_reason]
            on_progress(len(episodes) - len(live), len(episodes))
        return list(threads.map(lambda episode: episode.finish(sampler.version), episodes))
