"""This module parses the tool calls in a policy's turn.

A call may be a native call, which a chat server has parsed already, or text in one of these forms: between
the tags of Qwen and Hermes models (`<tool_call>`), as JSON or as `<function=…>` with parameters; between the
tokens of DeepSeek; as a message to a function in the harmony format of gpt-oss; as JSON in a fenced code
block; or as bare JSON, which Llama models write. Text that looks like a call but cannot be parsed becomes a
request with an `error`, which is shown to the policy as the observation of the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components.policy.chat_client import NativeCall

THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
BLOCK = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\n]+)>\n?(.*?)</function>\Z", re.DOTALL)
# Qwen3-Coder sometimes leaves out the opening `<tool_call>`.
BARE_FUNCTION = re.compile(
    r"<function=[^>\n]+>.*?</function>(?=\s*(?:</tool_call>|<function=|\Z))", re.DOTALL
)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n?</parameter>", re.DOTALL)
# In the harmony format (https://cookbook.openai.com/articles/openai-harmony): begin of a turn, tokens between
# messages, token between the header and the content of a message, recipient in the header of a call.
HARMONY = re.compile(r"(?:<\|start\|>assistant)?[^<]*<\|channel\|>")
MESSAGE_END, CONTENT_START = re.compile(r"<\|(?:start|end|call|return)\|>"), "<|message|>"
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
# Between the tokens of a call, DeepSeek-V3 and R1 write the word function, the separator, a name and JSON in
# a fence, and V3.1 writes a name, the separator and JSON. The last is a token that Llama may put first.
DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL)
DEEPSEEK_SEPARATOR, LLAMA_START = "<｜tool▁sep｜>", "<|python_tag|>"
FENCE = re.compile(
    r"^```(?:json|tool_call|tool|tool_code)?[ \t]*\n(.*?)(?:^```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE
)
LOOKS_LIKE_A_CALL = re.compile(r'\A\s*\[?\s*\{\s*"name"\s*:.*"(?:arguments|parameters)"\s*:', re.DOTALL)
# Largest number of calls of one turn that are run; further calls are ignored.
MAX_CALLS = 16
# Largest number of characters that the arguments of one call may have together.
MAX_ARGUMENT_CHARACTERS = 1 << 20
FORM = (
    "a call is <function=NAME>, its <parameter=…> and </function>, or one JSON object with name and arguments"
)


@dataclass(frozen=True)
class Request:
    """A tool call that the policy requests.

    `error` says why the call could not be accepted and is empty otherwise. `call_id` is the id of a native
    call and empty for calls in text.
    """

    name: str
    arguments: dict[str, Any]
    error: str = ""
    call_id: str = ""


def parse_calls(text: str, *, in_thought: bool = False) -> list[Request]:
    """Return the first `MAX_CALLS` tool calls in the text of a message.

    `in_thought` says whether the prompt opened the reasoning with which the text begins. If the text begins
    in the harmony format, only messages to a function are calls. Otherwise, text between `<think>` tags is
    ignored, and fenced and bare JSON is parsed only if the text has no call between tags or tokens.
    """
    if HARMONY.match(text):
        return [_limited(request) for request in _harmony_calls(text)][:MAX_CALLS]
    text = THOUGHT.sub("", f"<think>{text}" if in_thought else text)
    if blocks := DEEPSEEK.findall(text):
        return [_limited(_deepseek_call(block)) for block in blocks[:MAX_CALLS]]
    if blocks := BLOCK.findall(text) or BARE_FUNCTION.findall(text):
        return [_limited(request) for block in blocks for request in _tagged(block)][:MAX_CALLS]
    text = text.strip().removeprefix(LLAMA_START)
    fenced = [block for block in FENCE.findall(text) if LOOKS_LIKE_A_CALL.match(block)]
    if not fenced and LOOKS_LIKE_A_CALL.match(text):
        fenced = [text]
    return [_limited(request) for block in fenced for request in _json_calls(block)][:MAX_CALLS]


def native_calls(calls: tuple[NativeCall, ...]) -> list[Request]:
    """Return requests for the first `MAX_CALLS` of the tool calls that a chat server has parsed itself."""
    requests = []
    for index, call in enumerate(calls[:MAX_CALLS]):
        arguments = call.arguments or {}
        request = _named_call(call.name, arguments if isinstance(arguments, str) else json.dumps(arguments))
        requests.append(_limited(replace(request, call_id=call.id or f"call_{index}")))
    return requests


def _tagged(block: str) -> list[Request]:
    """Return the calls between two tags, which are one function with parameters, or JSON."""
    if function := FUNCTION.search(block):
        return [Request(function.group(1).strip(), dict(PARAMETER.findall(function.group(2))))]
    return _json_calls(block) or [Request("", {}, FORM)]


def _deepseek_call(block: str) -> Request:
    name, _, content = block.partition(DEEPSEEK_SEPARATOR)
    if name.strip() == "function":
        name, _, content = content.partition("\n")
        content = content.strip().removeprefix("```json").removesuffix("```")
    return _named_call(name.strip(), content)


def _harmony_calls(text: str) -> Iterator[Request]:
    for message in MESSAGE_END.split(text):
        header, _, content = message.partition(CONTENT_START)
        if (recipient := RECIPIENT.search(header)) is not None:
            yield _named_call(recipient.group(1), content)


def _named_call(name: str, arguments: str) -> Request:
    """Return a request to call the tool `name` with the arguments in the JSON text `arguments`.

    If the text is not a JSON object, the request has no arguments and an error.
    """
    try:
        return _call({"name": name, "arguments": json.loads(arguments)})
    except (ValueError, TypeError, RecursionError) as error:
        return Request(name, {}, f"its arguments are no JSON object ({error})")


def _json_calls(block: str) -> list[Request]:
    """Return the requests in a block of JSON that holds one call or a list of calls.

    If the block is anything else, the result is a single request with an error.
    """
    try:
        value = json.loads(block)
        return [_call(item) for item in (value if isinstance(value, list) else [value])]
    except (ValueError, KeyError, TypeError, RecursionError):
        return [Request("", {}, FORM)]


def _call(value: Any) -> Request:
    arguments = value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return Request(str(value["name"]), dict(arguments or {}))


def _limited(request: Request) -> Request:
    """Return `request`, or a copy with an error and without arguments if the arguments are too long."""
    size = sum(
        len(value) if isinstance(value, str) else len(repr(value)) for value in request.arguments.values()
    )
    if size <= MAX_ARGUMENT_CHARACTERS:
        return request
    problem = f"its arguments are {size} characters long, more than {MAX_ARGUMENT_CHARACTERS}"
    return Request(request.name, {}, problem, request.call_id)
