"""Open policies that write kernels: checkpoints on this machine, and models of OpenAI-compatible servers.

Both kinds are sampled through the class `Policy`, by the command `cuda-agent optimize` and by evaluations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from components.agent.episode import RolloutRequest, run_episodes
from components.agent.trajectory import Trajectory
from components.bootstrap.canonicalize import canonicalize
from components.bootstrap.operator_chain import read_chain
from components.core.config import is_gguf
from components.core.errors import UserError
from components.core.files import MANIFEST, digest_json, digest_tree, read_json
from components.core.params import Params
from components.policy.checkpoint import (
    BUCKET_BYTES,
    explain_load_errors,
    load_model,
    load_tokenizer,
    verify_checkpoint,
)
from components.policy.first_policy import adopted
from components.policy.sampler import Sampler
from components.policy.vllm.own_servers import check_own_servers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from components.policy.chat_client import ChatClient

# Largest context window, in tokens, that is chosen for a policy without a manifest.
MAX_CONTEXT = 32_768
# Upper bound of the default number of tokens in a turn, for a policy with the full prompt.
FULL_PROMPT_NEW_TOKENS = 8192
# Lower bound of the default number of turns in an evaluation of a policy with the full prompt.
FULL_PROMPT_TURNS = 30


@dataclass(frozen=True)
class Policy:
    """A model that writes kernels, with the parameters and the function with which it is sampled.

    `name` is the folder of the policy, or the names of its server and model, for messages. `version` is the
    short name of its weights, which trajectories (records of attempts at tasks) contain. `digest` is equal
    for equal policies. `params` are the parameters with which the policy is sampled. `sample` returns one
    trajectory for each task of a request, in the order of the tasks. `knows` says whether a task with the
    source it gets is one of those that the policy was made for. `close` ends connections to servers, after
    which nothing can be sampled.
    """

    name: str
    version: str
    digest: str
    params: Params
    sample: Callable[[RolloutRequest], list[Trajectory]]
    knows: Callable[[str], bool] = lambda code: True
    close: Callable[[], None] = lambda: None


def _folder_policy(folder: Path, params: Params, digest: str) -> Policy:
    """Return the policy in `folder`, to be sampled by the backend that the parameter `policy.backend` names.

    `digest` is the digest of the folder's files. The model is loaded when the policy is sampled for the first
    time, so no model is loaded if an evaluation is complete already. Raises UserError if the policy is to be
    sampled by vLLM servers that this process starts, and they cannot be started.
    """
    check_own_servers(params)

    @functools.cache
    def loaded() -> tuple[Sampler, PreTrainedTokenizerBase]:
        tokenizer = load_tokenizer(folder)
        return open_sampler(params, folder, tokenizer, version=digest), tokenizer

    def sample(request: RolloutRequest) -> list[Trajectory]:
        return run_episodes(request, *loaded())

    def close() -> None:
        from components.policy.vllm.sampler import VllmSampler

        sampler = loaded()[0] if loaded.cache_info().currsize else None
        if isinstance(sampler, VllmSampler):
            sampler.fleet.close()

    return Policy(
        str(folder), digest[:16], digest, params, sample, functools.partial(is_learned, params), close
    )


def is_learned(params: Params, code: str) -> bool:
    """Return whether a policy with the prompt of `params` has learned modules such as `code`.

    A policy with the full prompt knows any module. One with the compact prompt knows chains of core operators
    or, with data.operators=kernelbench, of tensor operators.
    """
    form = canonicalize(code)
    is_chain = read_chain(form or "") is not None
    return (
        params.policy.prompt == "full" or is_chain or (params.data.operators == "kernelbench" and bool(form))
    )


def open_sampler(
    params: Params, folder: Path, tokenizer: PreTrainedTokenizerBase, *, version: str
) -> Sampler:
    """Return a sampler of the model in `folder` by the backend that the parameter `policy.backend` names.

    `version` is the name of the model's weights in trajectories. With the backend vllm-server, the weights
    are sent to the vLLM servers before the sampler is returned, and again if a server was restarted.
    """
    from components.policy.transformers_sampler import TransformersSampler  # imports torch
    from components.policy.vllm.sampler import open_vllm_sampler
    from components.policy.weight_stream import weight_buckets

    settings = params.policy
    own_device = settings.backend == "transformers" or settings.weight_transfer == "ipc"
    load = functools.partial(
        load_model, folder, dtype=params.engine.dtype, device=params.device if own_device else "cpu"
    )
    model = load()
    if settings.backend == "transformers":
        return TransformersSampler(
            model, tokenizer, batch=settings.batch, device=params.device, version=version
        )
    sampler = open_vllm_sampler(params, folder, tokenizer, version=version)

    def push(model: PreTrainedModel) -> None:
        sampler.push(weight_buckets(model, BUCKET_BYTES), version=version, folder=folder)

    push(model)
    # The model is loaded anew, so that its memory is free meanwhile.
    sampler.push_again = lambda: push(load())
    return sampler


def checkpoint_policy(folder: Path, params: Params) -> Policy:
    """Return the policy of the checkpoint `folder`, to be sampled with `params` unchanged.

    Raises UserError if the folder has no manifest.json, which lists the digests of its files, or if a file
    has another digest than the manifest says.
    """
    return _folder_policy(folder, params, verify_checkpoint(folder).digest)


def folder_policy(folder: Path, params: Params, chosen: frozenset[str]) -> Policy:
    """Return the policy in `folder`, to be sampled with the prompt and context window of its training.

    For a policy that this project has not trained, they are the full prompt, which has instructions before
    the task, and the window in its config.json, but at most MAX_CONTEXT. `folder` may also be a GGUF file,
    which is converted once and kept in the folder `adopted` below the parameter `home`. `chosen` are the
    dotted keys of the parameters that the user has set, such as policy.context, which keep their values.
    Raises UserError if the folder holds no model, is damaged, or was trained for another device.
    """
    if is_gguf(folder) and folder.is_file():
        folder = adopted(folder, Path(params.home).expanduser() / "adopted")
    if not (folder / "config.json").is_file():
        raise UserError(
            f"--policy {folder}: no model in this folder, config.json is missing; give a checkpoint, a "
            "Hugging Face folder, or a GGUF file (for --policy also champion or an http address)."
        )
    manifest = verify_checkpoint(folder, params.device) if (folder / MANIFEST).is_file() else None
    trained = manifest.params.get("policy", {}) if manifest is not None else {}
    if trained:
        settings = {key: trained[key] for key in ("prompt", "context") if key in trained}
    else:
        with explain_load_errors(folder, "config.json"):
            window = int(read_json(folder / "config.json").get("max_position_embeddings", MAX_CONTEXT))
        settings = {"prompt": "full", "context": min(window, MAX_CONTEXT)}
    digest = manifest.digest if manifest is not None else digest_json(digest_tree(folder))
    return _folder_policy(folder, with_policy_settings(params, settings, chosen), digest)


def server_policy(chat: ChatClient, params: Params, chosen: frozenset[str]) -> Policy:
    """Return the policy that is sampled through `chat`, with the full prompt and a window of `MAX_CONTEXT`.

    The full prompt has instructions before the task (policy.prompt), and MAX_CONTEXT are 32,768 tokens.
    `chosen` are the dotted keys of the parameters that the user has set, such as policy.context, which keep
    their values. The digest is computed from the names of server and model, because the weights of a server
    are not known.
    """
    from components.agent.chat_rollout import run_chats  # imports openai

    params = with_policy_settings(params, {"prompt": "full", "context": MAX_CONTEXT}, chosen)
    name, digest = chat.version, digest_json(["server", chat.version])
    return Policy(name, name, digest, params, functools.partial(run_chats, chat=chat))


def with_policy_settings(params: Params, settings: dict[str, object], chosen: frozenset[str]) -> Params:
    """Return `params` with the policy section updated by `settings`.

    `settings` has values by their keys in the policy section, such as prompt. If policy.prompt of the result
    is full, the evaluation's limits of turns and of tokens in a turn are also replaced by the defaults for
    this prompt. `chosen` are the dotted keys of the parameters that the user has set, such as policy.prompt,
    which keep their values.
    """
    policy = params.policy.model_copy(
        update={key: value for key, value in settings.items() if f"policy.{key}" not in chosen}
    )
    evaluation = params.evaluation
    if policy.prompt == "full":
        limits = {
            "max_new_tokens": min(FULL_PROMPT_NEW_TOKENS, policy.context // 4),
            "max_turns": max(FULL_PROMPT_TURNS, evaluation.max_turns),
        }
        evaluation = evaluation.model_copy(
            update={key: value for key, value in limits.items() if f"evaluation.{key}" not in chosen}
        )
    return params.model_copy(update={"policy": policy, "evaluation": evaluation})
