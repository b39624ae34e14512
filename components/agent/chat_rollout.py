"""Sample rollouts from a chat server, with which each episode exchanges messages in threads.

An episode is one attempt of the policy at a task. Each request describes the tools, and native tool calls
(which the server has parsed) are used if an answer has any; otherwise calls are parsed from the text of the
answer. If the server refuses requests that describe tools, the descriptions are written into the first
message, and all calls are parsed from text.
"""

import asyncio
import functools
import json
from typing import Any

from components.agent.episode import SHORTENED, Episode, RolloutRequest
from components.agent.in_flight import run_all
from components.agent.tool_parser import native_calls, parse_calls
from components.agent.tool_schemas import descriptions
from components.agent.trajectory import Trajectory
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
    """Episode (one attempt at a task) whose policy is a chat server, with which it exchanges messages."""

    def __init__(self, request: RolloutRequest, index: int, chat: ChatClient):
        super().__init__(request, index, chat)
        self.chat = chat
        # Descriptions of the tools for the server, which are empty if it refuses them.
        self.described = descriptions()
        self.messages: list[dict[str, Any]] = [self.first_message()]

    async def take_turn(self) -> None:
        """Sample a turn and run its tool calls, both in threads, and append the messages to the history.

        If the server fails, the episode ends with the `finish_reason` server, and `error` says why.
        """
        try:
            with self.request.sampling.busy():
                reply = await asyncio.to_thread(self._ask, self._history())
        except ServerFailed as error:
            self.finish_reason, self.error = "server", str(error)
            return
        requests = native_calls(reply.calls) if reply.calls else parse_calls(reply.content)
        calls = await asyncio.to_thread(
            self.perform, reply.content, requests, cut=reply.finish_reason == "length"
        )
        if self.finish_reason:
            return
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
            texts = (f"<tool_response>\n{call.observation}\n</tool_response>" for call in calls)
            observations = [{"role": "user", "content": "\n".join(texts)}]
        self.messages += [message, *observations]

    def _ask(self, history: list[dict[str, Any]]) -> ChatTurn:
        ask = functools.partial(
            self.chat.turn,
            history,
            max_new_tokens=self.request.max_new_tokens,
            temperature=self.request.temperature,
            seed=self.request.turn_seed(self.index, len(self.turns)),
        )
        try:
            return ask(tools=self.described)
        except ToolsUnsupported:
            texts = "\n".join(json.dumps(tool["function"]) for tool in self.described)
            self.messages[0]["content"] += TEXT_FORM + texts
            self.described = []
            return ask(tools=())

    def _history(self) -> list[dict[str, Any]]:
        """Return the messages to send to the server, and set `shortened` to the number of shortened ones.

        The oldest messages with observations (what tool calls returned) are replaced by the text SHORTENED
        until all messages and a turn of `max_new_tokens` tokens fit into the context window, by an estimate
        from the number of characters. The latest message with an observation is never shortened.
        """
        capacity = (self.params.policy.context - self.request.max_new_tokens) * CHARACTERS_PER_TOKEN
        size = sum(len(json.dumps(message, ensure_ascii=False)) for message in self.messages)
        history, self.shortened = list(self.messages), 0
        # All messages after the first are turns of the assistant or observations.
        observed = [index for index, message in enumerate(history) if message["role"] != "assistant"][1:]
        for index in observed[:-1]:
            if size <= capacity:
                break
            size -= max(0, len(str(history[index]["content"])) - len(SHORTENED))
            history[index] = history[index] | {"content": SHORTENED}
            self.shortened += 1
        return history


def run_chats(request: RolloutRequest, chat: ChatClient) -> list[Trajectory]:
    """Sample one trajectory for each task of `request` from the server of `chat`, in the order of the tasks.

    A trajectory is the record of one attempt at a task. A trajectory during which the server failed has the
    `finish_reason` server and keeps its earlier turns.
    """

    async def run(index: int) -> Trajectory:
        try:
            episode = await asyncio.to_thread(ChatEpisode, request, index, chat)
            return await episode.run()
        except BaseException:
            chat.close()  # ends the requests that threads wait for
            raise

    return run_all(len(request.tasks), run, on_progress=request.on_progress, stop=request.stop)
