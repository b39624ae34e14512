"""The requests that vLLM's HTTP server understands and the answers that it gives, by its version.

The routes and fields are those of vLLM 0.24 and 0.33, which differ in one point that matters here: since
0.33, a route for token ids reports which weights sampled each token.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.core.errors import UserError
from components.policy.sampler import Completion

# Oldest version of vLLM that can be used, and first version that reports which weights sampled each token.
OLDEST, TOKEN_VERSIONS = (0, 24), (0, 33)
# Reasons for which a completion ends. With `abort` a server ends requests before a push of weights; the rest
# of such a completion is sampled with another request.
ENDS = ("stop", "length", "abort")
# Patterns of a line of /metrics (name, labels, value) and of one label in it (name, value).
METRIC = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Request:
    """A sequence to complete until one of the tokens `stop`, with at most `max_tokens` tokens.

    At temperature 0, each token is the most probable one.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    """Figures that a server reports about itself.

    `cache_tokens` is the number of tokens that the key-value cache holds, and `cache_usage` the share of it
    in use. `running` and `waiting` are numbers of sequences. `preemptions` and, in tokens, `prefix_queries`
    and `prefix_hits` are counted from the server's start.
    """

    cache_tokens: int
    cache_usage: float
    running: int
    waiting: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int


class VllmProtocol:
    """The form of the requests and answers of one version of vLLM's HTTP server."""

    def __init__(self, version: str):
        """Create the form for the version of vLLM that the server's route /version returned.

        A `version` without numbers, such as that of a development build, is taken for TOKEN_VERSIONS. Raises
        UserError if the version is older than `OLDEST`.
        """
        numbers = re.match(r"(\d+)\.(\d+)", version)
        self.number = (int(numbers.group(1)), int(numbers.group(2))) if numbers else TOKEN_VERSIONS
        if self.number < OLDEST:
            raise UserError(
                f"policy.servers: a server runs vLLM {version}, and 0.24 is the oldest that can be used; "
                "install a newer one."
            )
        self.names_versions = self.number >= TOKEN_VERSIONS

    def completion(self, request: Request, salt: str) -> tuple[str, dict[str, Any]]:
        """Return the route and the JSON body of a request for a completion.

        Requests share cached prefixes only if their `salt` is equal.
        """
        sampling = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stop_token_ids": list(request.stop),
            # These are set because otherwise the generation_config of the model would truncate the
            # distribution that is sampled.
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
        }
        cache = {"cache_salt": salt} if salt else {}
        if self.names_versions:
            body = {"token_ids": list(request.prompt), "sampling_params": sampling | {"detokenize": False}}
            return "/inference/v1/generate", body | cache
        tokens = {"return_token_ids": True, "return_tokens_as_token_ids": True, "add_special_tokens": False}
        return "/v1/completions", {"prompt": list(request.prompt), **sampling, **tokens, **cache}

    def completed(self, answer: Mapping[str, Any], version: str) -> Completion:
        """Return the completion in an answer; `version` names its weights if the answer does not."""
        choice = answer["choices"][0]
        logprobs = choice["logprobs"] or {}
        values = (
            [token["logprob"] for token in logprobs.get("content") or ()]
            if self.names_versions
            else logprobs.get("token_logprobs") or ()
        )
        ids = choice["token_ids"] or ()
        spans = choice.get("weight_versions") or ()
        versions = tuple(span["version"] for span in spans for _ in range(span["start"], span["end"]))
        return checked(ids, values, choice["finish_reason"], versions or version)


def checked(
    ids: Sequence[int], logprobs: Sequence[float], finish_reason: str, versions: str | tuple[str, ...]
) -> Completion:
    """Return a completion of vLLM after checking that its parts belong together.

    Raises UserError if there is not one log-probability and one name of weights for each token, or if the
    completion ended for another reason than those in `ENDS`.
    """
    named = len(ids) if isinstance(versions, str) else len(versions)
    if len(ids) != len(logprobs) or named != len(ids) or finish_reason not in ENDS:
        raise UserError(
            f"policy.backend: vLLM returned {len(ids)} tokens with {len(logprobs)} log-probabilities and "
            f"{named} versions, ended by {finish_reason}; run the same command again."
        )
    return Completion(tuple(ids), tuple(logprobs), finish_reason, versions)


def read_load(text: str) -> Load:
    """Return the figures in `text`, the answer of /metrics; figures of several engines are added."""
    sums: dict[str, float] = {}
    cache = 0
    for name, labels, value in METRIC.findall(text):
        if name == "vllm:cache_config_info":
            known = dict(LABEL.findall(labels))
            blocks, size = (known.get(key, "0") for key in ("num_gpu_blocks", "block_size"))
            cache += int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else 0
        else:
            sums[name] = sums.get(name, 0.0) + float(value)

    def total(name: str) -> int:
        return int(sums.get(f"vllm:{name}", sums.get(f"vllm:{name}_total", 0.0)))

    return Load(
        cache_tokens=cache,
        cache_usage=sums.get("vllm:kv_cache_usage_perc", 0.0),
        running=total("num_requests_running"),
        waiting=total("num_requests_waiting"),
        preemptions=total("num_preemptions"),
        prefix_queries=total("prefix_cache_queries"),
        prefix_hits=total("prefix_cache_hits"),
    )
