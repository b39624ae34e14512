"""Composition of tasks (PyTorch modules to be made faster) by a model on an OpenAI-compatible server.

Each request names operators of torch that tasks can use (the mined table), whose number is drawn according to
data.operator_mix. A request depends only on the parameters and on its number. Each answer is stored before it
is parsed. So a build that is started again sends only the requests without a stored answer, and makes the
same data set.
"""

import itertools
import random
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from components.core.errors import UserError
from components.core.files import digest_json, read_json, write_json
from components.core.params import Data
from components.core.task import KernelTask
from components.policy.chat_client import ChatClient, ServerFailed
from components.synthesis.dataset_summary import Rejection
from components.synthesis.operator_ablation import composed_task, draw_weighted

# Largest number of requests that are sent and not yet answered.
AHEAD = 8
# Number of successive answers without a source after which the build fails.
MAX_EMPTY_IN_A_ROW = 60
# Largest number of tokens of an answer.
MAX_NEW_TOKENS = 4096
# Patterns of reasoning in an answer, which is removed, and of a code block, which holds the source.
THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

QUESTION = """\
Write one self-contained PyTorch module that computes with exactly {count} of torch's operators, \
each used once, in an order that makes sense:
{operators}

- `class Model(nn.Module)` has `__init__` and `forward`; weights are made in `__init__`.
- `get_inputs()` returns the list of forward's arguments, float32 tensors of torch.randn; the first has \
{low} to {high} elements.
- `get_init_inputs()` returns the list of Model's arguments.
- Import nothing but `torch`, `torch.nn as nn` and `torch.nn.functional as F`, and call each operator by \
the name given above.
- forward draws no random numbers and returns one float32 tensor. Every operator, input and weight changes \
that tensor.
- One call in eager mode takes {fastest:g} to {slowest:g} ms.

Answer with one Python code block and nothing else."""


class ModelComposer:
    """Endless iterator over tasks that a language model composes, one for each request to its server.

    It yields a KernelTask (a PyTorch module to be made faster), or a Rejection with the reason if the answer
    holds no code block, in the order in which the requests were sent. The iteration raises UserError if the
    server fails, or after MAX_EMPTY_IN_A_ROW successive answers without a code block.
    """

    def __init__(self, operators: Sequence[str], data: Data, answers: Path):
        """Create the client of the language model's server, `data.composer`.

        `operators` has the operators' names, some of which are drawn for each request. `answers` is the
        folder in which the model's answers are kept, so that an interrupted build does not ask again.
        """
        self.operators, self.data, self.answers = operators, data, answers
        self.client = ChatClient(data.composer, data.composer_model, option="data.composer")

    def __iter__(self) -> Iterator[KernelTask | Rejection]:
        executor = ThreadPoolExecutor(AHEAD, thread_name_prefix="composer")
        pending: deque[tuple[tuple[str, ...], Future[dict[str, str]]]] = deque()
        rng, numbers, empty_in_a_row = random.Random(self.data.seed), itertools.count(), 0
        try:
            while True:
                while len(pending) < AHEAD:
                    ops = tuple(rng.sample(self.operators, draw_weighted(rng, self.data.operator_mix)))
                    pending.append((ops, executor.submit(self._answer, ops, next(numbers))))
                ops, answer = pending.popleft()
                candidate = self._parse(ops, answer.result())
                empty_in_a_row = empty_in_a_row + 1 if isinstance(candidate, Rejection) else 0
                if isinstance(candidate, Rejection) and empty_in_a_row >= MAX_EMPTY_IN_A_ROW:
                    raise UserError(
                        f"data.composer_model: {MAX_EMPTY_IN_A_ROW} answers in a row held no source "
                        f"({candidate.reason}); name a model that writes one."
                    )
                yield candidate
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            self.client.close()

    def _answer(self, ops: tuple[str, ...], number: int) -> dict[str, str]:
        """Return the model's answer to the request `number` for a task with the operators `ops`.

        The answer has the keys `content` and `finish_reason`. It is read from the folder `answers` if it is
        stored there, and otherwise requested from the server and stored. Raises UserError if the server
        fails.
        """
        (low, high), (fastest, slowest) = self.data.numel, self.data.eager_seconds
        question = QUESTION.format(
            count=len(ops),
            operators="\n".join(f"- {name}" for name in ops),
            low=low,
            high=high,
            fastest=fastest * 1e3,
            slowest=slowest * 1e3,
        )
        key = digest_json([self.data.composer_model, question, self.data.seed, number])
        path = self.answers / key[:2] / f"{key}.json"
        if not path.is_file():
            try:
                turn = self.client.turn(
                    [{"role": "user", "content": question}],
                    tools=(),
                    max_new_tokens=MAX_NEW_TOKENS,
                    temperature=1.0,
                    seed=int(key[:7], 16),
                )
            except ServerFailed as error:
                raise UserError(
                    f"data.composer: {error}; see to {self.client.url}, then run the same command again: "
                    "the answers so far are kept."
                ) from error
            # The answer may contain a lone surrogate, which UTF-8 cannot encode, so it is replaced.
            write_json(
                path,
                {
                    "content": turn.content.encode(errors="replace").decode(),
                    "finish_reason": turn.finish_reason,
                },
            )
        answer: dict[str, str] = read_json(path)
        return answer

    def _parse(self, ops: tuple[str, ...], answer: dict[str, str]) -> KernelTask | Rejection:
        text = THOUGHT.sub("", answer["content"])
        blocks = BLOCK.findall(text)
        task = composed_task(max(blocks, key=len, default=text), ops, self.data.held_out_seed)
        if not blocks:
            return Rejection(
                task,
                "cut_off" if answer["finish_reason"] == "length" else "no_code",
                f"an answer of {len(text)} characters",
            )
        return task
