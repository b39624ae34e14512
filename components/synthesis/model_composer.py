"""Composing by a language model: a server that speaks OpenAI's protocol is asked for tasks; the same task_filter decides (DESIGN §6).

Each question names operators of the mined table, as many as data.operator_mix says, and depends on the parameters and its
number alone. An answer is journalled before anybody reads it: a build that is started again asks for none of those again
and comes to the same data set, a finished one without a server. One that is asked anew may answer otherwise; that makes
another version.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from components.core.config import Data
from components.core.errors import UserError
from components.core.files import digest_json, read_json, write_json
from components.core.task import KernelTask
from components.policy.chat_client import ChatClient, ServerFailed
from components.synthesis.compose import is_held_out
from components.synthesis.dataset_summary import Rejection

AHEAD = 8
"""Questions under way at once."""
FRUITLESS = 60
"""Answers in a row without a source, after which the model is to blame."""
MAX_NEW_TOKENS = 4096
THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

QUESTION = """Write one self-contained PyTorch module that computes with exactly {count} of torch's operators, each used once, in an order that makes sense:
{operators}

- `class Model(nn.Module)` has `__init__` and `forward`; weights are made in `__init__`.
- `get_inputs()` returns the list of forward's arguments, float32 tensors of torch.randn; the first has {low} to {high} elements.
- `get_init_inputs()` returns the list of Model's arguments.
- Import nothing but `torch`, `torch.nn as nn` and `torch.nn.functional as F`, and call each operator by the name given above.
- forward draws no random numbers and returns one float32 tensor. Every operator, input and weight changes that tensor.
- One call in eager mode takes {fastest:g} to {slowest:g} ms.

Answer with one Python code block and nothing else."""


class ModelComposer:
    """Asks without end; its candidates come in the order of their questions."""

    def __init__(self, operators: Sequence[str], data: Data, answers: Path):
        """`answers` is the folder of the journal."""
        self.operators, self.data, self.answers = operators, data, answers
        self.client = ChatClient(data.composer, data.composer_model, named="data.composer")

    def __iter__(self) -> Iterator[KernelTask | Rejection]:
        executor = ThreadPoolExecutor(AHEAD, thread_name_prefix="composer")
        asked: deque[tuple[tuple[str, ...], Future[dict[str, str]]]] = deque()
        rng, number, fruitless = random.Random(self.data.seed), 0, 0
        mix = self.data.operator_mix
        try:
            while True:
                while len(asked) < AHEAD:
                    ops = tuple(
                        rng.sample(self.operators, rng.choices(list(mix), weights=list(mix.values()))[0])
                    )
                    asked.append((ops, executor.submit(self._answer, ops, number)))
                    number += 1
                ops, answer = asked.popleft()
                read = self._read(ops, answer.result())
                fruitless = fruitless + 1 if isinstance(read, Rejection) else 0
                if isinstance(read, Rejection) and fruitless >= FRUITLESS:
                    raise UserError(
                        f"data.composer_model: {FRUITLESS} answers in a row held no source ({read.reason}); name a model that writes one."
                    )
                yield read
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            self.client.close()

    def _answer(self, ops: tuple[str, ...], number: int) -> dict[str, str]:
        """Text and finish reason, from the journal or from the server."""
        (low, high), (fastest, slowest) = self.data.numel, self.data.eager_seconds
        operators = "\n".join(f"- {name}" for name in ops)
        question = QUESTION.format(
            count=len(ops),
            operators=operators,
            low=low,
            high=high,
            fastest=fastest * 1e3,
            slowest=slowest * 1e3,
        )
        key = digest_json([self.data.composer_model, question, self.data.seed, number])
        place = self.answers / key[:2] / f"{key}.json"
        if not place.is_file():
            messages = [{"role": "user", "content": question}]
            try:
                turn = self.client.turn(
                    messages, tools=(), max_new_tokens=MAX_NEW_TOKENS, temperature=1.0, seed=int(key[:7], 16)
                )
            except ServerFailed as error:
                raise UserError(
                    f"data.composer: {error}; see to {self.client.url}, then run the same command again: the answers so far are kept."
                ) from error
            # A lone surrogate, which JSON can spell, is no text.
            write_json(
                place,
                {
                    "content": turn.content.encode(errors="replace").decode(),
                    "finish_reason": turn.finish_reason,
                },
            )
        answer: dict[str, str] = read_json(place)
        return answer

    def _read(self, ops: tuple[str, ...], answer: dict[str, str]) -> KernelTask | Rejection:
        text = THOUGHT.sub("", answer["content"])
        blocks = BLOCK.findall(text)
        split = "held_out" if is_held_out(ops, self.data.seed) else "train"
        task = KernelTask.model_validate(
            {
                "code": max(blocks, key=len, default=text),
                "ops": ops,
                "data_source": f"torch#{len(ops)}",
                "split": split,
            }
        )
        if not blocks:
            return Rejection(
                task,
                "cut_off" if answer["finish_reason"] == "length" else "no_code",
                f"an answer of {len(text)} characters",
            )
        return task
