"""Rollouts over a chat server: each episode exchanges messages with the server in a thread of its own.

Native tool calls are used if the server supports them. If the server refuses descriptions of tools, the first
message describes the tools instead, and calls are parsed from the text of the answers.
"""

import asyncio
import functools
import json
from typing import Any

from components.agent.episode import SHORTENED, Episode, RolloutRequest, run_all
from components.agent.tool_parser import native_calls, parse_calls
from components.agent.tool_schemas import descriptions
from components.agent.trajectory import Trajectory
from components.core.task import KernelTask
from components.policy.chat_client import ChatClient, ChatTurn, ServerFailed, ToolsUnsupported

# Low estimate of the characters that one token of source text has. The length of a history in tokens is
# estimated with it, so that the history fits into the context window.
CHARACTERS_PER_TOKEN = 2.5
TEXT_FORM = """
Call a tool by writing, in your answer, one JSON object for each call between tags:
<tool_call>
{"name": "Write", "arguments": {"file_path": "kernels/forward.cpp", "content": "…"}}
</tool_call>
You get what the tools say as the next message. An answer without a call ends your work. The tools:
"""


class ChatEpisode(Episode):
    """Episode whose policy is a chat server, with which it exchanges messages."""

    def __init__(self, task: KernelTask, request: RolloutRequest, chat: ChatClient):
        super().__init__(task, request)
        self.chat = chat
        self.native = True
        self.messages: list[dict[str, Any]] = [self.first_message()]
        # Indices of the observations in `messages`.
        self.observed: list[int] = []

    def run(self, seed: int) -> Trajectory:
        """Sample turns until the episode ends, judge the final files and return the trajectory.

        The seed of each turn is derived from `seed`. If the server fails, the trajectory ends there and keeps
        the turns that were sampled before.
        """
        for turn in range(self.request.max_turns):
            if self.request.is_out_of_time():
                self.finish_reason = "time"
            else:
                self._turn(seed * 1_000_003 + turn, last=turn + 1 == self.request.max_turns)
            if self.finish_reason:
                break
        return self.finish(self.chat.version)

    def _turn(self, seed: int, *, last: bool) -> None:
        history, shortened = self._history()
        try:
            reply = self._ask(history, seed)
        except ServerFailed as error:
            self.finish_reason, self.error = "server", str(error)
            return
        requests = native_calls(reply.calls) if reply.calls else parse_calls(reply.content)
        calls = self.perform(
            reply.content, requests, cut=reply.finish_reason == "length", last=last, shortened=shortened
        )
        message: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.calls:
            message["tool_calls"] = [
                {
                    "id": request.call_id,
                    "type": "function",
                    "function": {
                        "name": request.name,
                        "arguments": json.dumps(request.arguments, ensure_ascii=False),
                    },
                }
                for request in requests
            ]
            observations = [
                {"role": "tool", "tool_call_id": request.call_id, "content": call.observation}
                for request, call in zip(requests, calls, strict=True)
            ]
        else:
            text = "\n".join(f"<tool_response>\n{call.observation}\n</tool_response>" for call in calls)
            observations = [{"role": "user", "content": text}] if calls else []
        first = len(self.messages) + 1
        self.observed += range(first, first + len(observations))
        self.messages += [message, *observations]

    def _ask(self, history: list[dict[str, Any]], seed: int) -> ChatTurn:
        ask = functools.partial(
            self.chat.turn,
            history,
            max_new_tokens=self.request.max_new_tokens,
            temperature=self.request.temperature,
            seed=seed,
        )
        if self.native:
            try:
                return ask(tools=descriptions())
            except ToolsUnsupported:
                self.native = False
                self.messages[0]["content"] += TEXT_FORM + "\n".join(
                    json.dumps(tool["function"]) for tool in descriptions()
                )
        return ask(tools=())

    def _history(self) -> tuple[list[dict[str, Any]], int]:
        """Return the messages to send to the server, and how many observations in them were shortened.

        The oldest observations are shortened until the messages and a turn of `max_new_tokens` fit into the
        context window, by an estimate from the number of characters. The latest observation is never
        shortened.
        """
        capacity = (self.params.policy.context - self.request.max_new_tokens) * CHARACTERS_PER_TOKEN
        size = sum(len(json.dumps(message, ensure_ascii=False)) for message in self.messages)
        history, shortened = list(self.messages), 0
        for index in self.observed[:-1]:
            if size <= capacity:
                break
            size -= max(0, len(str(history[index]["content"])) - len(SHORTENED))
            history[index] = history[index] | {"content": SHORTENED}
            shortened += 1
        return history, shortened


def run_chats(request: RolloutRequest, chat: ChatClient) -> list[Trajectory]:
    """Sample one trajectory for each task of `request` from the server of `chat`, and return them in order.

    A trajectory during which the server failed has the `finish_reason` server.
    """

    def run(index: int) -> Trajectory:
        episode = ChatEpisode(request.tasks[index], request, chat)
        try:
            return episode.run(request.seed * 1_000_003 + request.first + index)
        finally:
            episode.tools.close()

    async def run_in_thread(index: int) -> Trajectory:
        try:
            return await asyncio.to_thread(run, index)
        except BaseException:
            chat.close()  # ends the requests that threads wait for
            raise

    return run_all(request, run_in_thread, capacity=lambda: len(request.tasks))
