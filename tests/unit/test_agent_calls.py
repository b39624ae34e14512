"""Tool calls in four textual forms and native ones are read; unreadable ones are reported."""

import json
import time

import pytest

from components.agent.tool_parser import MAX_ARGUMENT_CHARACTERS, MAX_CALLS, native_calls, parse_calls
from components.policy.chat_client import NativeCall

ARGUMENTS = {"file_path": "kernels/forward.cu", "content": 'printf("</b>");\n'}
BODY = json.dumps({"name": "Write", "arguments": ARGUMENTS})
QWEN = """<tool_call>
<function=Write>
<parameter=file_path>
kernels/forward.cu
</parameter>
<parameter=content>
int a;
</parameter>
</function>
</tool_call>"""


# The recipient stands after the channel where the model writes it, and before it where the template does.
HARMONY = (
    "<|channel|>analysis<|message|>I send it to=functions.Bash or <tool_call> it.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.Write <|constrain|>json<|message|>"
    + json.dumps(ARGUMENTS)
    + "<|call|>"
)
HARMONY_RENDERED = f" to=functions.Write<|channel|>commentary json<|message|>{json.dumps(ARGUMENTS)}<|call|>"


def native(arguments: object, name: str = "Write") -> tuple[NativeCall, ...]:
    return (NativeCall.model_validate({"id": "a", "function": {"name": name, "arguments": arguments}}),)


@pytest.mark.parametrize(
    "text",
    [
        f"Let me write it.\n<tool_call>\n{BODY}\n</tool_call>",
        f"<tool_call>{BODY}",
        f"I write:\n```json\n{BODY}\n```\nDone.",
        f"```tool_call\n{BODY}\n```",
        f"```\n{BODY}\n```",
        BODY,
        json.dumps([json.loads(BODY)]),
        json.dumps({"name": "Write", "parameters": ARGUMENTS}),
        HARMONY,
        HARMONY_RENDERED,
        f"<think>I could <tool_call>nonsense</tool_call></think><tool_call>\n{BODY}\n</tool_call>",
    ],
    ids=[
        "hermes",
        "hermes_unclosed",
        "fenced",
        "fenced_tool_call",
        "fenced_bare",
        "bare",
        "list",
        "parameters",
        "harmony",
        "harmony_rendered",
        "after_a_thought",
    ],
)
def test_every_form_of_a_call_is_read(text: str) -> None:
    (request,) = parse_calls(text)
    assert (request.name, request.arguments, request.error) == ("Write", ARGUMENTS, "")


def test_the_qwen_form_keeps_text_as_it_is() -> None:
    (request,) = parse_calls(QWEN)
    assert request.arguments == {"file_path": "kernels/forward.cu", "content": "int a;"}


@pytest.mark.parametrize(
    "text",
    [
        f"<|channel|>analysis<|message|>{BODY}<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>",
        "Done.",
        "",
        "```cpp\nint a;\n```",
        '```json\n{"a": 1}\n```',
        '{"answer": 42}',
        "```json\n[1, 2]\n```",
    ],
)
def test_text_that_was_not_meant_as_a_call_is_none(text: str) -> None:
    assert parse_calls(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{'name': 'Write'}\n</tool_call>",
        '<tool_call>\n{"name": "Write", "arguments": {"content": "int a',
        "<tool_call>\n<function=Write>\n<parameter=content>\nint",
        "<tool_call></tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "Write", "arguments": 7}</tool_call>',
        '<tool_call>{"name": "Bash", "arguments": [["command", "ls"]]}</tool_call>',
        '```json\n{"name": "Write", "arguments": {"content": }}\n```',
        '<|channel|>commentary to=functions.Write<|message|>{"file_path": <|call|>',
        "<|channel|>commentary to=functions.Write<|message|>7<|call|>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_a_broken_call_is_a_request_with_an_error(text: str) -> None:
    (request,) = parse_calls(text)
    assert request.error


def test_a_megabyte_of_arguments_is_refused_and_named() -> None:
    call = {"name": "Write", "arguments": {"content": "x" * (MAX_ARGUMENT_CHARACTERS + 1)}}
    text = f"<tool_call>{json.dumps(call)}</tool_call>"
    (request,) = parse_calls(text)
    assert str(MAX_ARGUMENT_CHARACTERS) in request.error
    (request,) = native_calls(native(json.dumps({"content": "x" * (MAX_ARGUMENT_CHARACTERS + 1)})))
    assert str(MAX_ARGUMENT_CHARACTERS) in request.error


def test_a_policy_that_never_stops_calling_is_held_at_the_limit() -> None:
    assert len(parse_calls(f"<tool_call>{BODY}</tool_call>" * 1000)) == MAX_CALLS
    assert len(native_calls(native("{}") * 1000)) == MAX_CALLS


@pytest.mark.parametrize(
    ("given", "fine"),
    [
        (json.dumps(ARGUMENTS), True),
        (ARGUMENTS, True),
        (None, True),
        ("", True),
        ("{", False),
        ("[1]", False),
        ("[" * 100_000, False),
    ],
)
def test_native_arguments_are_text_or_an_object(given: object, fine: bool) -> None:
    (request,) = native_calls(native(given))
    assert (request.error == "") is fine
    assert request.call_id == "a"


QWEN_WRITE = (
    "<tool_call>\n<function=Write>\n<parameter=file_path>\nkernels/a.cpp\n</parameter>\n{}</function>\n"
    "</tool_call>"
)
COMMAND, FILE = ("Bash", {"command": "ls"}), ("Write", {"file_path": "kernels/a.cpp", "content": "int a;"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '<tool_call>{"name": "Bash", "arguments": {"command": "a\n\tb"}}</tool_call>',
            ("Bash", {"command": "a\n\tb"}),
        ),
        (
            '<tool_call>{"name": "Bash", "arguments": {"command": "</tool_call> <tool_call>"}}</tool_call>',
            ("Bash", {"command": "</tool_call> <tool_call>"}),
        ),
        ("<tool_call><function=Bash><parameter=command>ls</parameter></function></tool_call>", COMMAND),
        (QWEN_WRITE.format("<parameter=content>int a;</parameter>\n"), FILE),
        (
            QWEN_WRITE.format("<parameter=content>\n// </parameter> and </function>\nint a;\n</parameter>\n"),
            ("Write", {"file_path": "kernels/a.cpp", "content": "// </parameter> and </function>\nint a;"}),
        ),
        (
            "<tool_call>Write\n<arg_key>file_path</arg_key>\n<arg_value>kernels/a.cpp</arg_value>\n"
            "<arg_key>content</arg_key>\n<arg_value>int a;</arg_value>\n</tool_call>",
            FILE,
        ),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.Bash:0<|tool_call_argument_begin|>"
            '{"command": "ls"}<|tool_call_end|><|tool_calls_section_end|>',
            COMMAND,
        ),
        (
            '<minimax:tool_call>\n<invoke name="Bash">\n<parameter name="command">ls</parameter>\n</invoke>\n'
            "</minimax:tool_call>",
            COMMAND,
        ),
        ('[TOOL_CALLS] [{"name": "Bash", "arguments": {"command": "ls"}}]', COMMAND),
        ('[TOOL_CALLS]Bash[ARGS]{"command": "ls"}', COMMAND),
        ('<tool_call>{"function": "Bash", "arguments": {"command": "ls"}}</tool_call>', COMMAND),
        (
            '<tool_call>{"type": "function", "function": {"name": "Bash", '
            '"arguments": "{\\"command\\": \\"ls\\"}"}}</tool_call>',
            COMMAND,
        ),
    ],
)
def test_forms_of_other_models_are_read_as_written(text: str, expected: tuple[str, dict[str, str]]) -> None:
    (request,) = parse_calls(text)
    assert (request.name, request.arguments, request.error) == (*expected, "")


def test_one_block_may_hold_several_objects() -> None:
    calls = (
        '{"name": "Bash", "arguments": {"command": "ls"}}\n{"name": "Bash", "arguments": {"command": "pwd"}}'
    )
    found = parse_calls(f"<tool_call>\n{calls}\n</tool_call>")
    assert [request.arguments["command"] for request in found] == ["ls", "pwd"]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=Bash>\n<parameter=command>\nls\n</parameter\n</function>\n</tool_call>",
        "<tool_call>\n<function=Bash>\n<parameter=command>\nls\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls",}}\n</tool_call>',
        '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}\n</tool_call>',
        "<tool_call>Write\n<arg_key>file_path</arg_key>\n<arg_value>kernels/a.cpp\n</tool_call>",
        "<tool_call>Write",
        "<tool_call>Write\n<arg_key>file_path</arg_key>\n<arg_value>kernels/a.cpp</arg_value>\n",
        "<function=Bash>\n<parameter=command>\nls\n</parameter>\n",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.Ba",
        '<|tool_call_begin|>functions.Bash:0<|tool_call_argument_begin|>{"command": "l',
        "<minimax:tool_call>\n",
        '<minimax:tool_call>\n<invoke name="Bash">\n<parameter name="command">l',
        '<minimax:tool_call>\n<invoke name="Bash">\n<parameter name="command">ls</parameter>\n',
        "[TOOL_CALLS]",
        "[TOOL_CALLS]Bash",
        '[TOOL_CALLS]Bash[ARGS]{"command": "l',
        '[TOOL_CALLS]Bash{"command": "ls"',
        '[TOOL_CALLS] [{"name": "Bash", "arguments": {"command": "ls"}',
    ],
)
def test_a_call_is_never_cut_silently(text: str) -> None:
    (request,) = parse_calls(text)
    assert not request.arguments and request.error


# A file that has the tags and tokens of every form.
MARKED = (
    "// a <b>list</b> & [TOOL_CALLS]x[ARGS]{} of <tool_call>y</tool_call>\n\n"
    '#include <vector>\n<invoke name="z">\n<parameter name="p">1</parameter>\n</invoke> // </arg_value>\n'
    "<function=f>\n</parameter>\n\tint a;  \n<minimax:tool_call>"
)


def written(form: str, *calls: tuple[str, dict[str, str]]) -> str:
    """Return a turn with calls as the chat template of a model writes them."""
    match form:
        case "glm-4.6" | "glm-4.7":
            end = "\n" if form == "glm-4.6" else ""
            return "".join(
                f"{end}<tool_call>{name}{end}"
                + "".join(
                    f"<arg_key>{key}</arg_key>{end}<arg_value>{value}</arg_value>{end}"
                    for key, value in arguments.items()
                )
                + "</tool_call>"
                for name, arguments in calls
            )
        case "minimax-m2":
            invokes = "".join(
                f'<invoke name="{name}">\n'
                + "".join(
                    f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items()
                )
                + "</invoke>\n"
                for name, arguments in calls
            )
            return f"\n<minimax:tool_call>\n{invokes}</minimax:tool_call>"
        case "qwen3-coder":
            return "\n".join(
                f"<tool_call>\n<function={name}>\n"
                + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
                + "</function>\n</tool_call>"
                for name, arguments in calls
            )
    texts = [(name, json.dumps(arguments)) for name, arguments in calls]
    match form:
        case "kimi-k2":
            begin, between, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
            parts = [
                f"{begin}functions.{name}:{i}{between}{text}{end}" for i, (name, text) in enumerate(texts)
            ]
            return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"
        case "mistral-v3":
            objects = [
                f'{{"name": "{name}", "arguments": {text}, "id": "a1b2c3d4e"}}' for name, text in texts
            ]
            return f"[TOOL_CALLS] [{', '.join(objects)}]</s>"
        case "mistral-v11":
            return "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1b2c3d4e[ARGS]{text}" for name, text in texts)
        case "mistral-v13":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in texts)
        case "magistral":
            return "".join(f"[TOOL_CALLS]{name}{text}" for name, text in texts)
        case _:
            return "\n".join(
                f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
                for name, text in texts
            )


FORMS = (
    *("glm-4.6", "glm-4.7", "minimax-m2", "qwen3-coder", "kimi-k2"),
    *("mistral-v3", "mistral-v11", "mistral-v13", "magistral", "hermes"),
)
# Forms in which a token separates calls, wherever it stands.
SPLIT_AT = dict.fromkeys(("mistral-v11", "mistral-v13", "magistral"), "[TOOL_CALLS]")


@pytest.mark.parametrize("form", FORMS)
def test_several_calls_with_code_that_has_tags_are_read_whole(form: str) -> None:
    content = MARKED.replace(SPLIT_AT.get(form, "\0"), "[CALLS]")
    calls = (
        ("Write", {"file_path": "kernels/a.cpp", "content": content}),
        ("TodoWrite", {"todos": '[{"content": "a\\nb", "status": "pending"}]'}),
        ("Bash", {"command": "bash utils/compile.sh\nls"}),
    )
    found = parse_calls("I write it first." + written(form, *calls))
    assert [(request.name, request.arguments, request.error) for request in found] == [
        (name, arguments, "") for name, arguments in calls
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_turn_that_is_cut_anywhere_has_whole_calls_and_an_error(form: str) -> None:
    """Only a cut before the name of a call, or after all of it, may leave no error."""
    calls = (("Bash", {"command": "ls"}), ("Edit", {"file_path": "a", "old_string": "b", "new_string": "c"}))
    text = written(form, *calls)
    for length in range(text.index("Bash") + 4, len(text)):
        requests = parse_calls(text[:length])
        whole = [(request.name, request.arguments) for request in requests if not request.error]
        assert whole == list(calls[: len(whole)]), text[:length]
        begun = 2 if "Edit" in text[:length] else 1
        assert len(whole) >= begun or len(requests) > len(whole), text[:length]


def test_a_section_of_calls_ends_a_thought_of_kimi() -> None:
    text = f"I compile it. {written('kimi-k2', COMMAND)}"
    assert [request.arguments for request in parse_calls(text, in_thought=True)] == [COMMAND[1]]


@pytest.mark.parametrize("depth", [33, 500, 5000])
def test_arguments_that_are_nested_deeply_are_refused(depth: int) -> None:
    """A record of such a call could not be written."""
    nested = "[" * depth + "]" * depth
    for value in (nested, nested.replace("[", "[{}, ", 1)):
        (request,) = parse_calls(write_call(value))
        assert request.error and request.arguments == {}
    (request,) = parse_calls(write_call("[" * 31 + "]" * 31))
    assert not request.error


def test_half_of_a_surrogate_pair_is_refused() -> None:
    """Neither a tokenizer nor a chat server could encode the history with such a call."""
    texts = [write_call(r'"\ud83d"'), r'{"name": "Ba\ud83dsh", "arguments": {"a": 1}}']
    requests = [parse_calls(text)[0] for text in texts] + native_calls(native(r'{"content": ["\ud83d"]}'))
    for request in requests:
        request.name.encode()
        assert "surrogate" in request.error and request.arguments == {}
    (whole,) = parse_calls(write_call(r'"\ud83d\ude00"'))
    assert whole.arguments == {"content": "\N{GRINNING FACE}"}


def write_call(content: str) -> str:
    return f'<tool_call>{{"name": "Write", "arguments": {{"content": {content}}}}}</tool_call>'


@pytest.mark.parametrize(
    ("start", "repeated", "end"),
    [
        ('<invoke name="Bash">', " ", ""),
        ("<function=Bash>", "\n", "</function>"),
        ("<function=Bash>", "<parameter=a>b</parameter>x", "</function>"),
        ("<tool_call>Bash<arg_key>a</arg_key>", " ", "</arg_value></tool_call>"),
        ("```json\n", " ", "</tool_call>"),
        ("", "<function=", ""),
    ],
)
def test_a_turn_that_repeats_itself_is_read_in_linear_time(start: str, repeated: str, end: str) -> None:
    begun = time.process_time()
    parse_calls(start + repeated * (200_000 // len(repeated)) + end)
    assert time.process_time() - begun < 20, "milliseconds are usual; quadratic time is minutes"
