"""A client of an OpenAI-compatible server, with the openai package: chat completions and the list of models.

A request is repeated with growing pauses if the server answers with status 429 or 5xx or cannot be reached; a
chat completion is repeated with another seed. The repetitions of the openai package are not used, because
they keep the seed. A request is not repeated after another error status, after an answer that is not valid,
or if a connected server sends nothing for `REQUEST_SECONDS`. The API key is read from the environment
variable OPENAI_API_KEY and not written to any file.
"""

import os
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import httpx
import openai
from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from components.core.errors import UserError

# Largest number of attempts of a request.
TRIES = 6
# Largest number of attempts of the request for the list of models. It is small, so that a wrong address is
# reported soon.
MODEL_LIST_TRIES = 2
# The pause before attempt n + 1 is at most FIRST_PAUSE_SECONDS * 2^n, and at most LONGEST_PAUSE_SECONDS.
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
# Longest time for which a connected server may send nothing, and longest time to connect.
REQUEST_SECONDS, CONNECT_SECONDS = 600.0, 10.0
Message = dict[str, Any]


class ServerFailed(Exception):
    """Exception that is raised if a server returns no usable answer. The message says why in one sentence."""


class ToolsUnsupported(Exception):
    """Exception that is raised if a server refuses a request that describes tools, with status 400 or 422."""


class _ServerRecord(BaseModel):
    """Base class of the records that are read from a server's answers; it ignores unknown fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def _label(value: Any) -> Any:
    """Return the text of an integer, "" for None, and any other value unchanged."""
    return "" if value is None else str(value) if isinstance(value, int) else value


Label = Annotated[str, BeforeValidator(_label)]


class NativeCall(_ServerRecord):
    """A tool call that the server has parsed from the model's message.

    `id` and `name`, that of the tool, are "" if the server sends none or null. Some servers send a number as
    the id. `arguments` is JSON text or an object, and None if the server sends none.
    """

    id: Label = ""
    name: Label = Field(default="", validation_alias=AliasPath("function", "name"))
    arguments: str | dict[str, Any] | None = Field(
        default=None, validation_alias=AliasPath("function", "arguments")
    )


class _Message(_ServerRecord):
    content: str | None = None
    tool_calls: tuple[NativeCall, ...] | None = None


class ChatTurn(_ServerRecord):
    """One turn of the assistant: its message, and the reason why it ended, such as "stop".

    `finish_reason` is None if the server sends none.
    """

    message: _Message
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        return self.message.content or ""

    @property
    def calls(self) -> tuple[NativeCall, ...]:
        return self.message.tool_calls or ()


class _Reply(_ServerRecord):
    choices: tuple[ChatTurn, ...] = Field(min_length=1)


class _Models(_ServerRecord):
    first: str = Field(default="", validation_alias=AliasPath("data", 0, "id"))


R = TypeVar("R", bound=_ServerRecord)


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
        between attempts. Raises UserError if `url` is no http or https address, or if the API key cannot be
        sent.
        """
        base = url.rstrip("/")
        self.url = base if re.search(r"/v\d+$", base) else f"{base}/v1"
        self.model = model
        self.option = option
        self.pause = pause
        self.choosing = threading.Lock()
        try:
            parsed = httpx.URL(self.url)
            if parsed.scheme not in ("http", "https") or not parsed.host:
                raise httpx.InvalidURL("http://HOST:PORT is expected")
        except httpx.InvalidURL as error:
            raise UserError(
                f"{option} {url}: not an address ({error}); give for instance http://localhost:8000/v1."
            ) from error
        # The openai package needs a key; servers that need none ignore it.
        key = os.environ.get("OPENAI_API_KEY", "").strip() or "none"
        if not (key.isascii() and key.isprintable()):
            raise UserError(
                "OPENAI_API_KEY: it has characters that no request can carry; copy it again, or unset it."
            )
        self.openai = openai.OpenAI(
            base_url=self.url,
            api_key=key,
            timeout=openai.Timeout(REQUEST_SECONDS, connect=CONNECT_SECONDS),
            max_retries=0,
        )

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
                    models = self._request(
                        lambda attempt: self.openai.models.with_raw_response.list(), _Models, MODEL_LIST_TRIES
                    )
                except ServerFailed as error:
                    raise UserError(
                        f"{self.option} {self.url}: {error}; start the server or fix the address."
                    ) from error
                if not models.first:
                    raise UserError(
                        f"{self.option} {self.url}: the server names no model; give one with --model."
                    )
                self.model = models.first
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
        """Sample the assistant's next turn after `messages`, which are dictionaries with role and content.

        `tools` are the descriptions of the tools that the model may call, in the form of the server's
        interface. At most `max_new_tokens` tokens are sampled. A repeated attempt adds its index to `seed`.
        Raises ServerFailed if no attempt returned a usable turn, ToolsUnsupported if the server refuses
        `tools`, and UserError if the name of the model cannot be found out (`choose_model`).
        """
        body: dict[str, Any] = {
            "model": self.choose_model(),
            "messages": list(messages),
            "max_tokens": max_new_tokens,
            "temperature": temperature,
        }
        if tools:
            body["tools"] = list(tools)
        create = self.openai.chat.completions.with_raw_response.create
        try:
            # `transformers serve` answers 500 if a sampled tool call is incomplete. The same seed would
            # sample the same call again, so each attempt has another one.
            return self._request(lambda attempt: create(**body, seed=seed + attempt), _Reply, TRIES).choices[
                0
            ]
        except ServerFailed as error:
            if tools and isinstance(
                error.__cause__, openai.BadRequestError | openai.UnprocessableEntityError
            ):
                raise ToolsUnsupported(str(error)) from error
            raise

    def _request(self, send: Callable[[int], Any], form: type[R], tries: int) -> R:
        """Return the answer to a request, which `send` sends, as a record of the class `form`.

        `send` takes the index of the attempt, from 0 on, and returns a raw response of the openai package.
        Raises ServerFailed if `tries` attempts fail, if the server refuses the request for good or sends
        nothing for REQUEST_SECONDS, or if the answer does not fit the class `form`.
        """
        for attempt in range(tries):
            wait = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (attempt + 1))
            wait *= random.uniform(0.5, 1.0)
            try:
                return form.model_validate_json(send(attempt).text)
            except ValidationError as error:
                fault = error.errors()[0]
                problem = ": ".join([*filter(None, [".".join(map(str, fault["loc"]))]), fault["msg"]])
                wanted = "list of models" if form is _Models else "chat completion"
                raise ServerFailed(f"the server's answer is no {wanted} ({problem})") from error
            except openai.APIStatusError as error:
                status, text = error.status_code, " ".join(error.response.text.split())[:200]
                failure = f"the server answers {status}: {text}"
                if status != 429 and status < 500:
                    raise ServerFailed(failure) from error
                after = error.response.headers.get("retry-after", "")
                wait = max(wait, min(LONGEST_PAUSE_SECONDS, float(after) if after.isdigit() else 0.0))
            except openai.APIConnectionError as error:
                cause = error.__cause__ or error
                # By its name, because the openai package has an HTTP client of its own (httpx2).
                if type(cause).__name__ == "ReadTimeout":
                    raise ServerFailed(f"the server has not answered within {REQUEST_SECONDS:g} s") from error
                failure = f"no answer ({type(cause).__name__}: {str(cause)[:200]})"
            if attempt + 1 < tries:
                self.pause(wait)
        raise ServerFailed(f"{failure}, {tries} times")

    def close(self) -> None:
        self.openai.close()
