"""Checkpoints of policies, which are Hugging Face folders with a manifest.

A checkpoint is a folder that transformers and vLLM can load (safetensors, config, tokenizer), with an
additional file `manifest.json` that has the digest of every other file. A folder without a matching manifest
is not a checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import Field

from components.core.config import load_arguments
from components.core.errors import UserError, refuse
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
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

# Size of the parts, in bytes, in which a model is gathered, written and sent. A model of at most this size is
# written to one file.
BUCKET_BYTES = 2**31


class Manifest(FrozenModel):
    """The origin of a checkpoint and the digests of its files.

    `stage` is the training stage that wrote the checkpoint, or "adopted" for a model from another project.
    `parent` is the digest of the checkpoint from which this stage started, and `dataset` the version of its
    data set. `code` identifies the source code that was run. `files` has the SHA-256 of every file by path,
    and `digest`, computed from `files`, identifies the whole checkpoint. `params` and `figures` are the
    parameters and the metrics of the stage.
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
    writes: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
) -> Manifest | Any:  # None without `writes`, which a caller knows; Any spares the others a check
    """Write the model, the tokenizer and a manifest to `folder` atomically, and return the manifest.

    The manifest has the checkpoint's origin and the digests of its files. Every rank must call this, because
    the model may be sharded, and exactly one with `writes`; the other ranks return None. No rank gathers more
    of the model at once than about `bucket_bytes`. A model with an adapter is written with the adapter
    merged, and the adapter itself is written to the folder `adapter` in peft's format. The arguments from
    `stage` to `figures` are recorded in the manifest (see `Manifest`). `extra` has further tensors, by the
    name of the safetensors file in which they are stored.
    """
    from safetensors.torch import save_file

    from components.policy.weight_stream import adapter_buckets, weight_buckets

    if not writes:
        for _ in itertools.chain(weight_buckets(model, bucket_bytes), adapter_buckets(model, bucket_bytes)):
            pass
        return None
    with atomic_folder(folder) as temporary:
        write_model(temporary, model, bucket_bytes)
        if model._hf_peft_config_loaded:
            _write_adapter(temporary / "adapter", model, bucket_bytes)
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


def write_model(folder: Path, model: PreTrainedModel, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Write the configuration and weights of `model` to `folder`, with the file names of `save_pretrained`.

    A file of weights has at most about `bucket_bytes` bytes. If the model is sharded, the ranks that do not
    write must iterate over `weight_buckets` with the same `bucket_bytes` instead.
    """
    from safetensors.torch import save_file

    from components.policy.weight_stream import weight_buckets

    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    shards: list[list[str]] = []
    total = 0
    for bucket in weight_buckets(model, bucket_bytes):
        tensors = {name: tensor.contiguous() for name, tensor in bucket.items()}
        shards.append(list(tensors))
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
    count = len(shards)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        files = ["model.safetensors"]
    else:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )
    for number, file in enumerate(files, 1):
        (folder / f"{number}.safetensors").rename(folder / file)


def _write_adapter(folder: Path, model: PreTrainedModel, bucket_bytes: int) -> None:
    """Write the adapter of `model` to `folder` in peft's format, from buckets of at most `bucket_bytes`."""
    from safetensors.torch import save_file

    from components.policy.weight_stream import ADAPTER, adapter_buckets

    tensors = {
        name: tensor.cpu().contiguous().clone()
        for bucket in adapter_buckets(model, bucket_bytes)
        for name, tensor in bucket.items()
    }
    config: Any = copy.copy(model.peft_config[ADAPTER])
    config.base_model_name_or_path = None
    config.inference_mode = True
    # peft keeps a set, whose order differs between processes.
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def verify_checkpoint(folder: Path, device: str = "") -> Manifest:
    """Return the manifest of a checkpoint after checking its files.

    The manifest has the digest of each other file. Raises UserError if the manifest is missing or damaged, or
    if a file does not match it, which the message names. If `device` is not empty, also raises UserError if
    the policy was trained to write kernels for another device.
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

    `folder` is the Hugging Face folder, or the GGUF file, from which the block loads something. `what` names
    what is loaded, such as "tokenizer", for the message. Errors of the operating system other than a missing
    file are raised unchanged.
    """
    from jinja2 import TemplateError
    from safetensors import SafetensorError

    try:
        yield
    except (
        OSError,
        ValueError,
        LookupError,
        struct.error,
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
            "give a whole Hugging Face folder, or a GGUF file that transformers can read."
        ) from error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder or a GGUF file.

    Raises UserError if it cannot be loaded, or has no chat template that works.
    """
    from transformers import AutoTokenizer

    with explain_load_errors(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(**load_arguments(folder))
        size = len(tokenizer)
    refuse(
        (
            size < 2,
            f"{folder}: there is no tokenizer in it; "
            "add tokenizer.json, or the files of its model's tokenizer.",
        ),
        (
            tokenizer.chat_template is None,
            f"{folder}: the tokenizer has no chat template; add chat_template.jinja to the folder, or give "
            "an instruction-tuned model.",
        ),
    )
    with explain_load_errors(folder, "chat template"):
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
        )
    return tokenizer


def load_generation_config(folder: Path) -> GenerationConfig:
    """Return the generation config of the model in a folder.

    If the folder has none, it is made from the model's config. Raises UserError if neither can be loaded.
    """
    from transformers import AutoConfig, GenerationConfig

    with explain_load_errors(folder, "generation config"):
        if (folder / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(folder)
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))


def load_model(folder: Path, *, dtype: torch.dtype | str = "float32", device: str = "cpu") -> PreTrainedModel:
    """Return the causal language model in a folder, in evaluation mode.

    Raises UserError if it cannot be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with explain_load_errors(folder, "model"):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    torch.nn.Module.to(model, device)
    return model  # from_pretrained has set it to evaluation mode
