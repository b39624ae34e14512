"""A client of an OpenAI-compatible server, which uses POST /chat/completions and GET /models.

A request is repeated with growing pauses and another seed if the server answers with status 429 or 5xx or
cannot be reached. It is not repeated after another error status, after an answer that is not valid, or if the
server does not answer within `REQUEST_SECONDS`. The API key is read from the environment variable
OPENAI_API_KEY and not written to any file.
"""

import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.core.errors import UserError

# Largest number of attempts of a request.
TRIES = 6
# Largest number of attempts of the request for the list of models. It is small, so that a wrong address is
# reported soon.
MODEL_LIST_TRIES = 2
# The pause before attempt n + 1 is at most FIRST_PAUSE_SECONDS * 2^n, and at most LONGEST_PAUSE_SECONDS.
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
MAX_REPLY_BYTES = 16 << 20
REQUEST_SECONDS = 600.0
Message = dict[str, Any]


class ServerFailed(Exception):
    """Exception that is raised if a server returns no usable answer. The message says why in one sentence."""


class ToolsUnsupported(Exception):
    """Exception that is raised if a server refuses a request that describes tools, with status 400 or 422."""


class _ServerRecord(BaseModel):
    """Base class of the records in an answer, which ignores unknown fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Function(_ServerRecord):
    name: str = ""
    arguments: str | dict[str, Any] | None = None


class NativeCall(_ServerRecord):
    """A tool call that the server has parsed. `function.arguments` is JSON text or an object."""

    id: str = ""
    function: _Function = _Function()


class _Message(_ServerRecord):
    content: str | None = None
    tool_calls: tuple[NativeCall, ...] | None = None


class _Choice(_ServerRecord):
    message: _Message
    finish_reason: str | None = None


class _Reply(_ServerRecord):
    choices: tuple[_Choice, ...] = Field(min_length=1)


class ChatTurn(_ServerRecord):
    """One turn of the assistant: its text, its tool calls and the reason why it ended, such as "stop"."""

    content: str
    calls: tuple[NativeCall, ...]
    finish_reason: str


class ChatClient:
    """A client of one model on one server, which is safe for concurrent use."""

    def __init__(
        self,
        url: str,
        model: str = "",
        *,
        option: str = "--policy",
        pause: Callable[[float], None] = time.sleep,
    ):
        """Prepare a client without contacting the server.

        If `model` is empty, the first model in the server's list of models is used. `option` is the command
        line option that gave `url`; error messages name it. `pause` is called with the seconds to wait
        between attempts.
        """
        base = url.rstrip("/")
        self.url = base if re.search(r"/v\d+$", base) else f"{base}/v1"
        key = os.environ.get("OPENAI_API_KEY", "")
        self.model = model
        self.option = option
        self.pause = pause
        self.choosing = threading.Lock()
        try:
            self.http = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(REQUEST_SECONDS, connect=10.0),
                limits=httpx.Limits(max_connections=256),
            )
            if self.http.base_url.scheme not in ("http", "https") or not self.http.base_url.host:
                raise httpx.InvalidURL("http://HOST:PORT is expected")
        except httpx.InvalidURL as error:
            raise UserError(
                f"{option} {url}: not an address ({error}); give for instance http://localhost:8000/v1."
            ) from error

    @property
    def version(self) -> str:
        return f"{self.url} {self.model}".strip()

    def choose_model(self) -> str:
        """Return the name of the model; if none was given, it is requested from the server once.

        Raises UserError if the server cannot be reached or names no model.
        """
        with self.choosing:
            if not self.model:
                try:
                    models = self._request("GET", "/models", None, MODEL_LIST_TRIES)["data"]
                    self.model = str(models[0]["id"])
                except ServerFailed as error:
                    raise UserError(
                        f"{self.option} {self.url}: {error}; start the server or fix the address."
                    ) from error
                except (KeyError, IndexError, TypeError) as error:
                    raise UserError(
                        f"{self.option} {self.url}: the server names no model; give one with --model."
                    ) from error
            return self.model

    def turn(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]],
        max_new_tokens: int,
        temperature: float,
        seed: int,
    ) -> ChatTurn:
        """Sample the assistant's next turn after `messages`.

        `tools` are the descriptions of the tools that the model may call, in the form of the server's
        interface. Raises ServerFailed if no attempt returned a usable turn, and ToolsUnsupported if the
        server refuses `tools`.
        """
        body = {
            "model": self.choose_model(),
            "messages": list(messages),
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        answer = self._request("POST", "/chat/completions", body | ({"tools": list(tools)} if tools else {}))
        try:
            reply = _Reply.model_validate(answer)
        except ValidationError as error:
            first = error.errors()[0]
            raise ServerFailed(
                "the server's answer is no chat completion "
                f"({'.'.join(map(str, first['loc']))}: {first['msg']})"
            ) from error
        choice = reply.choices[0]
        return ChatTurn(
            content=choice.message.content or "",
            calls=choice.message.tool_calls or (),
            finish_reason=choice.finish_reason or "stop",
        )

    def _request(self, method: str, path: str, body: dict[str, Any] | None, tries: int = TRIES) -> Any:
        fault, retry_after = "", 0.0
        for attempt in range(tries):
            if attempt:
                longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**attempt)
                self.pause(max(retry_after, longest * random.uniform(0.5, 1.0)))
                # `transformers serve` answers 500 if a sampled tool call is incomplete. The same seed would
                # sample the same call again, so the seed is changed.
                body = body | {"seed": body["seed"] + 1} if body is not None else None
            try:
                with self.http.stream(method, path, json=body) as response:
                    text = _read(response)
            except httpx.ReadTimeout as error:
                raise ServerFailed(f"the server has not answered within {REQUEST_SECONDS:g} s") from error
            except (httpx.TransportError, httpx.DecodingError) as error:
                fault = f"no answer ({type(error).__name__}: {str(error)[:200]})"
                continue
            status = response.status_code
            if status == 200:
                try:
                    return json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise ServerFailed(f"the server's answer is not JSON ({text[:80]!r})") from error
            fault = f"the server answers {status}: {' '.join(text.decode(errors='replace').split())[:200]}"
            if status == 429 or status >= 500:
                header = response.headers.get("retry-after", "")
                retry_after = (
                    min(LONGEST_PAUSE_SECONDS, float(header)) if header.replace(".", "", 1).isdigit() else 0.0
                )
                continue
            if status in (400, 422) and body is not None and "tools" in body:
                raise ToolsUnsupported(fault)
            raise ServerFailed(fault)
        raise ServerFailed(f"{fault}, {tries} times")

    def close(self) -> None:
        self.http.close()


def _read(response: httpx.Response) -> bytes:
    """Return the body of an answer.

    Raises ServerFailed if the body is longer than MAX_REPLY_BYTES or takes longer than REQUEST_SECONDS.
    """
    text, started = bytearray(), time.monotonic()
    for part in response.iter_bytes():
        text += part
        if time.monotonic() - started > REQUEST_SECONDS:
            raise ServerFailed(f"the server's answer took longer than {REQUEST_SECONDS:g} s")
        if len(text) > MAX_REPLY_BYTES:
            raise ServerFailed(f"the server's answer is longer than {MAX_REPLY_BYTES} bytes")
    return bytes(text)
