"""The client of a chat server: what it asks again, and what it says of answers that it cannot use."""

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from agent_fixtures import completion, server

from components.core.errors import UserError
from components.policy import chat_client
from components.policy.chat_client import ChatClient, ServerFailed, ToolsUnsupported


def ask(
    answers: Callable[[int, dict[str, Any]], tuple[int, bytes, dict[str, str]]],
    pauses: list[float] | None = None,
) -> Any:
    with server(answers) as url:
        client = ChatClient(url, pause=(pauses if pauses is not None else []).append)
        try:
            return client.turn(
                [{"role": "user", "content": "hi"}],
                tools=[{"type": "function"}],
                max_new_tokens=9,
                temperature=1.0,
                seed=1,
            )
        finally:
            client.close()


def test_a_server_of_the_openai_protocol_answers_with_native_calls() -> None:
    heard: list[dict[str, Any]] = []

    def answers(number: int, body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        heard.append(body)
        return 200, completion("hello", [("Read", '{"file_path": "model.py"}')], finish="tool_calls"), {}

    turn = ask(answers)
    assert (turn.content, turn.calls[0].name, turn.finish_reason) == ("hello", "Read", "tool_calls")
    assert heard[0]["model"] == "tiny" and heard[0]["max_tokens"] == 9 and heard[0]["tools"]


@pytest.mark.parametrize("status", [429, 500, 503, 0])
def test_a_busy_server_is_asked_again(status: int) -> None:
    pauses: list[float] = []
    seeds: list[int] = []

    def answers(number: int, body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        seeds.append(body["seed"])
        return (status, b"busy", {"Retry-After": "7"}) if number < 2 else (200, completion("ok"), {})

    assert ask(answers, pauses).content == "ok"
    assert len(pauses) == 2 and seeds == [1, 2, 3]
    assert all(pause >= (7 if status else 0.25) for pause in pauses)


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (500, b"sorry", "the server answers 500: sorry, 6 times"),
        (404, b"no such model", "the server answers 404: no such model"),
        (200, b"", "is no chat completion (Invalid JSON"),
        (200, b"<html>", "is no chat completion (Invalid JSON"),
        (200, b"[" * 100_000, "is no chat completion (Invalid JSON"),
        (200, b"{}", "is no chat completion (choices: Field required)"),
        (200, b'{"choices": []}', "is no chat completion"),
        (200, b'{"choices": [{"message": {"content": 7}}]}', "is no chat completion"),
        (200, b"x" * (16 << 20), "is no chat completion (Invalid JSON"),
        (0, b"", "no answer"),
    ],
    ids=[
        "500",
        "404",
        "nothing",
        "html",
        "nested",
        "empty_object",
        "no_choice",
        "wrong_type",
        "endless",
        "hangs_up",
    ],
)
def test_a_server_that_answers_nonsense_is_named_in_one_sentence(status: int, text: bytes, said: str) -> None:
    with pytest.raises(ServerFailed) as raised:
        ask(lambda number, body: (status, text, {}))
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_server_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_client, "REQUEST_SECONDS", 0.2)

    def answers(number: int, body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        time.sleep(0.6)
        return 0, b"", {}

    with server(answers) as url, pytest.raises(ServerFailed, match=r"has not answered within 0\.2 s"):
        ChatClient(url, "tiny", pause=lambda seconds: pytest.fail("asked again")).turn(
            [], tools=(), max_new_tokens=9, temperature=1.0, seed=1
        )


def test_a_connection_that_is_not_made_in_time_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_client, "CONNECT_SECONDS", 0.05)
    pauses: list[float] = []
    with socket.socket() as full:  # a listener whose queue of connections is full does not answer
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        held = [socket.socket() for _ in range(3)]
        for waiting in held:
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        client = ChatClient(f"http://127.0.0.1:{full.getsockname()[1]}", "tiny", pause=pauses.append)
        with pytest.raises(ServerFailed, match=r"no answer .*, 6 times"):
            client.turn([], tools=(), max_new_tokens=9, temperature=1.0, seed=1)
        for waiting in held:
            waiting.close()
    assert len(pauses) == 5


def test_a_refusal_of_tools_is_told_apart() -> None:
    with pytest.raises(ToolsUnsupported):
        ask(lambda number, body: (400, b"tools are not supported", {}))


def test_a_server_that_is_not_there_is_bad_input() -> None:
    with pytest.raises(UserError, match="start the server or fix the address"):
        ChatClient("http://127.0.0.1:9", pause=lambda seconds: None).choose_model()
    with (
        server(lambda number, body: (0, b"", {}), models=b"<html>") as url,
        pytest.raises(
            UserError, match=r"is no list of models \(Invalid JSON.*\); start .* or fix the address"
        ),
    ):
        ChatClient(url).choose_model()
    with pytest.raises(UserError, match="not an address"):
        ChatClient("http://")


@pytest.mark.parametrize(("given", "read"), [("null", ""), ("0", "0"), ('"a"', "a")])
def test_an_id_that_is_null_or_a_number_is_read(given: str, read: str) -> None:
    calls = f'[{{"id": {given}, "function": {{"name": "Read", "arguments": "{{}}"}}}}]'
    text = f'{{"choices": [{{"message": {{"content": null, "tool_calls": {calls}}}}}]}}'
    (call,) = ask(lambda number, body: (200, text.encode(), {})).calls
    assert (call.id, call.name) == (read, "Read")


def test_a_key_that_no_request_can_carry_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("cl\N{LATIN SMALL LETTER E WITH ACUTE}", "a\nb"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(UserError, match="OPENAI_API_KEY: it has characters"):
            ChatClient("http://localhost:8000")
    monkeypatch.setenv("OPENAI_API_KEY", "key\n")
    assert ChatClient("http://localhost:8000").openai.api_key == "key"
