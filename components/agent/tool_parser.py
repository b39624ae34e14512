"""Parse the tool calls in a turn, which is one message of a policy.

A call may be a native call, which a chat server has parsed already, or text in one of these forms: between
the tags of Qwen and Hermes models (`<tool_call>`), as JSON or as `<function=…>` with parameters, or with the
keys and values of GLM; between the tags or tokens of DeepSeek, Kimi, MiniMax and Mistral; as a message to a
function in the harmony format of gpt-oss; as JSON in a fenced code block; or as bare JSON, which Llama models
write. The first tag or token in a text decides on its form, so a value may contain those of other forms.

Text that looks like a call but cannot be parsed as a whole becomes a request with an `error`, which is shown
to the policy as the observation of the call, that is, in place of the tool's output.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components.policy.chat_client import NativeCall

# A section of calls ends a thought of Kimi-K2, which sometimes leaves out the tag.
THOUGHT = re.compile(r"<think>.*?(?:</think>|(?=<\|tool_calls_section_begin\|>)|\Z)", re.DOTALL)
# Tags around a call in JSON, in Qwen's form or in GLM's, and the call in Qwen's form without the first tag,
# which Qwen3-Coder sometimes leaves out. The end of the text may cut the last one off.
BLOCK_START, BLOCK_END = "<tool_call>", re.compile(r"</tool_call>|\Z")
FUNCTION_BLOCK = re.compile(
    r"(<function=[^<>\n]+>.*?(?:</function>(?=\s*(?:</tool_call>|<function=|<tool_call>|\Z))|\Z))", re.DOTALL
)
FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
# A parameter ends at the tag before the next parameter or at the end, so a value may contain the tag.
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*(?=<parameter=[^>\n]+>|\Z)", re.DOTALL)
# GLM-4.5 and later: the name, then keys and values. A value may contain the tag that ends the call.
GLM_CALL = re.compile(r"([\w.-]+)\s*(?:</tool_call>|(<arg_key>.*?</arg_value>)\s*</tool_call>)", re.DOTALL)
GLM_ARGUMENT = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL
)
# MiniMax-M2. A call that the end of the text cuts off has no last group, and perhaps no others.
INVOKE = re.compile(
    r'<invoke(?: name="([^"\n]+)">(.*?)(?:(</invoke>)(?=\s*(?:<invoke|</minimax:tool_call>|\Z))|\Z)|[^>]*\Z)',
    re.DOTALL,
)
INVOKE_PARAMETER = re.compile(
    r'\s*<parameter name="([^"\n]+)">(.*?)</parameter>\s*(?=<parameter name="|\Z)', re.DOTALL
)
# Kimi-K2, whose names are such as functions.Bash:0.
KIMI_START = re.compile(r"<\|tool_calls?_section_begin\|>\s*(?:<\|tool_call_begin\|>)?|<\|tool_call_begin\|>")
KIMI_NAME = re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>")
KIMI_END = re.compile(r"<\|tool_call(?:s?_section)?_end\|>")
# Mistral: a list of calls, or a name and arguments, between which newer models write tokens.
MISTRAL_NAME = re.compile(r"\s*([\w.-]+?)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]|(?=\{))")
# In the harmony format (https://cookbook.openai.com/articles/openai-harmony): begin of a turn, tokens between
# messages, token between the header and the content of a message, recipient in the header of a call.
HARMONY = re.compile(r"(?:<\|start\|>assistant)?[^<]*<\|channel\|>")
MESSAGE_END, CONTENT_START = re.compile(r"<\|(?:start|end|call|return)\|>"), "<|message|>"
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
# Between the tokens of a call, DeepSeek-V3 and R1 write the word function, the separator, a name and JSON in
# a fence, and V3.1 writes a name, the separator and JSON. The last is a token that Llama may put first.
DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL)
DEEPSEEK_SEPARATOR, LLAMA_START = "<｜tool▁sep｜>", "<|python_tag|>"
# The tags and tokens that begin a call or a section of calls, of which the first decides on the form.
START = re.compile(
    r"<｜tool▁call▁begin｜>|<\|tool_call(?:s?_section)?_begin\|>|\[TOOL_CALLS\]"
    r'|<minimax:tool_call>|<invoke name="[^"\n]+">|<tool_call>|<function=[^<>\n]+>'
)
FENCE = re.compile(
    r"^```(?:json|tool_call|tool|tool_code)?[ \t]*\n(.*?)(?:^```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE
)
LOOKS_LIKE_A_CALL = re.compile(r'\A\s*(?:\[\s*)?\{\s*"name"\s*:.*"(?:arguments|parameters)"\s*:', re.DOTALL)
# Largest number of calls of one turn that are run; further calls are ignored.
MAX_CALLS = 16
# Largest number of characters that the arguments of one call may have together.
MAX_ARGUMENT_CHARACTERS = 1 << 20
# Largest number of lists and objects of JSON that lie in one another in an argument.
MAX_DEPTH = 32
NOT_BLANK = re.compile(r"\S")
# Strings in JSON may contain raw ends of lines, which models write.
JSON = json.JSONDecoder(strict=False)
FORM = (
    "a call is <function=NAME>, its <parameter=…> and </function>, or one JSON object with name and arguments"
)


@dataclass(frozen=True)
class Request:
    """A tool call that the policy requests.

    `name` is the name of the tool, and `arguments` are its arguments by name, which are not validated yet.
    `error` says why the call could not be accepted and is empty otherwise. `call_id` is the id of a native
    call (one that a chat server has parsed) and empty for calls in text.
    """

    name: str
    arguments: dict[str, Any]
    error: str = ""
    call_id: str = ""


def parse_calls(text: str, *, in_thought: bool = False) -> list[Request]:
    """Return the first `MAX_CALLS` tool calls in the text of a message, in their order.

    `in_thought` says whether the prompt ended with `<think>`, so that the text begins inside the policy's
    reasoning. If the text begins in the harmony format, only messages to a function are calls. Otherwise,
    text between `<think>` tags is ignored, and fenced and bare JSON is parsed only if the text has no call
    between tags or tokens. A call that cannot be parsed, or has more than `MAX_ARGUMENT_CHARACTERS`
    characters of arguments, or a lone surrogate, gives a request with an error and without arguments.
    """
    if HARMONY.match(text):
        return [_limited(request) for request in _harmony_calls(text)][:MAX_CALLS]
    text = THOUGHT.sub("", f"<think>{text}" if in_thought else text)
    requests = _calls_between_tags(text) or _calls_in_json(text.strip().removeprefix(LLAMA_START))
    return [_limited(request) for request in requests[:MAX_CALLS]]


def _calls_between_tags(text: str) -> list[Request]:
    """Return all calls in the text that are written in the syntax of its first call.

    The first tag or token that begins a call, such as `<tool_call>`, decides which syntax that is. The result
    is empty if the text has no such tag or token. If it has one but no call can be found, the result is one
    request with an error.
    """
    if (found := START.search(text)) is None:
        return []
    match found.group():
        case "[TOOL_CALLS]":
            requests = _mistral_calls(text[found.end() :].lstrip())
        case "<tool_call>":
            requests = list(itertools.islice(_blocks(text), MAX_CALLS))
        case start if start.startswith(("<minimax:", "<invoke")):
            requests = [_invoke_call(*call.groups("")) for call in INVOKE.finditer(text)]
        case start if start.startswith("<function="):
            requests = [_function_call(block) for block in FUNCTION_BLOCK.findall(text)]
        case start if start.startswith("<|"):
            parts = (KIMI_END.split(part, 1)[0] for part in KIMI_START.split(text)[1:])
            requests = [_call_after_name(part, KIMI_NAME) for part in parts]
        case _:
            requests = [_deepseek_call(block) for block in DEEPSEEK.findall(text)]
    return requests or [Request("", {}, f"it is not finished; {FORM}")]


def _calls_in_json(text: str) -> list[Request]:
    """Return the calls in the fenced blocks of `text` that begin like a call in JSON.

    If there is no such block and `text` itself begins like a call in JSON, the calls in it are returned, and
    otherwise an empty list. JSON that cannot be read gives a request with an error.
    """
    fenced = filter(LOOKS_LIKE_A_CALL.match, FENCE.findall(text))
    blocks = list(fenced) or list(filter(LOOKS_LIKE_A_CALL.match, [text]))
    return [request for block in blocks for request in _leading_json(block.lstrip())[0]]


def _blocks(text: str) -> Iterator[Request]:
    """Yield the calls in all blocks `<tool_call>`, of which the last may have no end.

    A block without a call gives a request with an error. The end of a call in JSON is found by parsing the
    JSON, because a string in it may contain `</tool_call>`.
    """
    position = 0
    while (start := text.find(BLOCK_START, position)) >= 0:
        rest = text[start + len(BLOCK_START) :].lstrip()
        if rest.startswith("<function=") and (block := FUNCTION_BLOCK.match(rest)):
            requests, length = [_function_call(block.group(1))], block.end(1)
        elif rest.startswith(("{", "[")):
            requests, length = _leading_json(rest)
        elif (call := GLM_CALL.match(rest)) is not None:
            requests = [_call_with_parts(call.group(1), call.group(2) or "", GLM_ARGUMENT)]
            length = call.end() - len("</tool_call>")
        else:
            requests, length = [], 0
        yield from requests or [Request("", {}, FORM)]
        end = BLOCK_END.search(rest, length)
        position = len(text) - len(rest) + (end.end() if end is not None else len(rest))


def _leading_json(text: str) -> tuple[list[Request], int]:
    """Return the calls in the JSON values with which a text begins, and the position at which reading ended.

    The position is that of the first character after these values that is not blank, or the end of the last
    value if only blanks follow. If a value cannot be read or is no call, the last request has an error.
    """
    requests, end = list[Request](), 0
    try:
        while text[end : end + 1] in ("{", "[") and len(requests) < MAX_CALLS:
            value, end = JSON.raw_decode(text, end)
            requests += [_call(item) for item in (value if isinstance(value, list) else [value])]
            if (next_value := NOT_BLANK.search(text, end)) is None:
                break
            end = next_value.start()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        requests.append(Request("", {}, f"its JSON cannot be read ({error}); {FORM}"))
    return requests, end


def native_calls(calls: tuple[NativeCall, ...]) -> list[Request]:
    """Return requests for the first `MAX_CALLS` of the tool calls that a chat server has parsed itself.

    A request has an error if the arguments of its call are no JSON object, have more than
    `MAX_ARGUMENT_CHARACTERS` characters, or have a lone surrogate. A call without an id gets the id
    call_N, where N is its index from 0.
    """
    requests = []
    for index, call in enumerate(calls[:MAX_CALLS]):
        arguments = call.arguments or {}
        request = _named_call(call.name, arguments if isinstance(arguments, str) else json.dumps(arguments))
        requests.append(_limited(replace(request, call_id=call.id or f"call_{index}")))
    return requests


def _function_call(block: str) -> Request:
    """Return the call in a block of Qwen's form, which begins with `<function=`.

    The request has an error if the block has no `</function>` or has text that is no whole parameter.
    """
    if (function := FUNCTION.match(block)) is None:
        return Request("", {}, f"it has no </function>; {FORM}")
    return _call_with_parts(function.group(1).strip(), function.group(2), PARAMETER)


def _call_with_parts(name: str, body: str, part: re.Pattern[str]) -> Request:
    """Return a request to call the tool `name` with the arguments that `part` matches in `body`.

    `part` is a pattern of one argument, whose groups are the argument's name and value. If a value begins
    with a line feed, this one and a line feed at the end of the value are removed. If the matches of `part`
    do not cover all of `body`, the request has no arguments and an error.
    """
    values, end = dict[str, str](), 0
    while (found := part.match(body, end)) is not None:
        value = found.group(2)
        if value.startswith("\n"):
            value = value.removeprefix("\n").removesuffix("\n")
        values[found.group(1).strip()] = value
        end = found.end()
    if body[end:].strip():
        return Request(name, {}, f"this part of it is no whole argument: {body[end:].strip()[:60]!r}; {FORM}")
    return Request(name, values)


def _invoke_call(name: str, body: str, end: str) -> Request:
    """Return a request to call the tool `name` with the parameters in `body`, which has MiniMax's form.

    `end` is the text of the tag that ends the call. If it is empty, the request has an error.
    """
    request = _call_with_parts(name, body, INVOKE_PARAMETER)
    return request if end or request.error else Request(name, {}, f"it has no </invoke>; {FORM}")


def _call_after_name(part: str, name: re.Pattern[str]) -> Request:
    """Return the call in `part`, the text after a token that begins a call: a name and then JSON.

    `name` is a pattern of the name and of what stands between name and arguments. The request has an error if
    `part` does not begin with it, or if the arguments are no JSON object.
    """
    if (found := name.match(part)) is None:
        return Request("", {}, f"it has no name and arguments; {FORM}")
    return _named_call(found.group(1), part[found.end() :])


def _mistral_calls(text: str) -> list[Request]:
    """Return the calls in `text`, which follows the first token `[TOOL_CALLS]` of a model of Mistral.

    The text is JSON with the calls, or it has a name and arguments for each call, with the token
    `[TOOL_CALLS]` between two calls. A part without a name and arguments gives a request with an error.
    """
    if text.startswith(("[", "{")):
        return _leading_json(text)[0]
    return [_call_after_name(part, MISTRAL_NAME) for part in text.split("[TOOL_CALLS]")]


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
        return _call({"name": name, "arguments": JSON.decode(arguments)})
    except (ValueError, TypeError, RecursionError) as error:
        return Request(name, {}, f"its arguments are no JSON object ({error})")


def _call(value: Any) -> Request:
    """Return the request that the decoded JSON value `value` describes.

    The value is an object with the keys `name` and `arguments` (or `parameters`), of which the latter is an
    object or its JSON text. The key `function` may have the name instead, or may be the object with these
    keys. Raises KeyError, TypeError or ValueError if the value is no call.
    """
    function = value.get("function") if isinstance(value, dict) else None
    if isinstance(function, dict):
        value = function
    elif isinstance(function, str):
        value = {"name": function} | value
    arguments = value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
    if isinstance(arguments, str):
        arguments = JSON.decode(arguments)
    return Request(str(value["name"]), {**(arguments or {})})  # which a list of pairs would not be


def _limited(request: Request) -> Request:
    """Return `request`, or a copy with an error and without arguments if it cannot be accepted.

    Its arguments are too long if all of them together have more than `MAX_ARGUMENT_CHARACTERS` characters,
    and too deep if more than `MAX_DEPTH` lists and objects lie in one another. Name and arguments must be
    text that UTF-8 can encode, which a lone surrogate, half of a pair that JSON escapes, is not.
    """
    if _is_deeper(request.arguments, MAX_DEPTH + 1):
        problem = f"its arguments have more than {MAX_DEPTH} lists and objects in one another"
        return Request(request.name, {}, problem, request.call_id)
    size = sum(
        len(value) if isinstance(value, str) else len(repr(value)) for value in request.arguments.values()
    )
    if size > MAX_ARGUMENT_CHARACTERS:
        problem = f"its arguments are {size} characters long, more than {MAX_ARGUMENT_CHARACTERS}"
        return Request(request.name, {}, problem, request.call_id)
    try:
        json.dumps([request.name, request.arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        name = request.name.encode(errors="replace").decode()
        return Request(name, {}, "it has half of a surrogate pair, which is no text", request.call_id)
    return request


def _is_deeper(value: Any, depth: int) -> bool:
    """Return whether more than `depth` lists and dictionaries lie in one another in `value`."""
    if not isinstance(value, dict | list):
        return False
    return depth == 0 or any(
        _is_deeper(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value)
    )
