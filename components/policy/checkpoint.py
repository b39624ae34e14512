"""Checkpoints of policies, which are Hugging Face folders with a manifest.

A checkpoint is a folder that transformers and vLLM can load (safetensors, config, tokenizer), with an
additional file `manifest.json` that has the digest of every other file. A folder without a matching manifest
is not a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import Field

from components.core.errors import UserError
from components.core.files import (
    MANIFEST,
    atomic_folder,
    digest_json,
    digest_tree,
    read_json,
    verify_files,
    write_json,
)
from components.core.records import FrozenModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Manifest(FrozenModel):
    """The origin of a checkpoint and the digests of its files.

    `stage` is the training stage that wrote the checkpoint, `parent` the digest of the checkpoint from which
    this stage started, and `dataset` the version of its data set. `code` identifies the source code that was
    run. `files` has the digest of every file by path, and `digest`, computed from `files`, identifies the
    whole checkpoint.
    """

    stage: str
    files: dict[str, str]
    digest: str
    parent: str | None = None
    dataset: str = ""
    code: str = ""
    params: dict[str, Any] = Field(default_factory=dict)
    figures: dict[str, float] = Field(default_factory=dict)


def save_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    stage: str,
    parent: str | None,
    dataset: str,
    code: str,
    params: dict[str, Any],
    figures: dict[str, float],
    extra: Mapping[str, dict[str, torch.Tensor]] = MappingProxyType({}),
) -> Manifest:
    """Write the model, the tokenizer and a manifest to `folder` atomically, and return the manifest.

    The arguments from `stage` to `figures` are recorded in the manifest. `extra` has further tensors, by the
    name of the safetensors file in which they are stored.
    """
    from safetensors.torch import save_file

    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for name, tensors in extra.items():
            save_file(tensors, temporary / name)
        files = digest_tree(temporary)
        manifest = Manifest(
            stage=stage,
            files=files,
            digest=digest_json(files),
            parent=parent,
            dataset=dataset,
            code=code,
            params=params,
            figures=figures,
        )
        write_json(temporary / MANIFEST, manifest.model_dump())
    return manifest


def verify_checkpoint(folder: Path, device: str = "") -> Manifest:
    """Return the manifest of a checkpoint after checking its files.

    Raises UserError, which names the file, if a file does not match the manifest. If `device` is not empty,
    also raises UserError if the policy was trained to write kernels for another device.
    """
    try:
        manifest = Manifest.model_validate(read_json(folder / MANIFEST))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: not a checkpoint, {MANIFEST} is missing or damaged; give a folder that a stage wrote."
        ) from error
    verify_files(folder)
    if device and (trained_device := manifest.params.get("device", device)) != device:
        raise UserError(
            f"{folder}: it was trained to write kernels for {trained_device}; "
            f"give --set device={trained_device} or another policy."
        )
    return manifest


@contextlib.contextmanager
def explain_load_errors(folder: Path, what: str) -> Iterator[None]:
    """Convert the errors that transformers raises in the block for a damaged folder into a UserError.

    `what` names the part of the folder in the message. Errors of the operating system other than a missing
    file are raised unchanged.
    """
    from jinja2 import TemplateError
    from safetensors import SafetensorError

    try:
        yield
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        TemplateError,
        SafetensorError,
    ) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise
        message = " ".join(str(error).split())[:200]
        raise UserError(
            f"{folder}: its {what} cannot be loaded ({type(error).__name__}: {message}); "
            "give a whole Hugging Face folder."
        ) from error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    with explain_load_errors(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        size = len(tokenizer)
    if size < 2:
        raise UserError(
            f"{folder}: there is no tokenizer in it; "
            "add tokenizer.json, or the files of its model's tokenizer."
        )
    if tokenizer.chat_template is None:
        raise UserError(
            f"{folder}: the tokenizer has no chat template; add chat_template.jinja to the folder."
        )
    with explain_load_errors(folder, "chat template"):
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
        )
    return tokenizer


def load_model(folder: Path, *, dtype: torch.dtype | str = "float32", device: str = "cpu") -> PreTrainedModel:
    """Return the causal language model in a folder, in evaluation mode.

    Raises UserError if it cannot be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with explain_load_errors(folder, "model"):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    torch.nn.Module.to(model, device)
    model.eval()
    return model
