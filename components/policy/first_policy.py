"""First policies from other projects: Hugging Face folders and GGUF files, which become checkpoints.

A first policy is the model with which a run starts. A checkpoint is a Hugging Face folder with the file
manifest.json, which has the digests of all other files.
"""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from components.core.config import is_gguf, load_arguments
from components.core.errors import UserError
from components.core.files import (
    MANIFEST,
    atomic_folder,
    digest_file,
    digest_json,
    digest_tree,
    locked,
    read_json,
    write_json,
)
from components.policy.checkpoint import (
    Manifest,
    explain_load_errors,
    load_tokenizer,
    verify_checkpoint,
    write_model,
)


def source_digest(source: Path) -> str:
    """Return the SHA-256 that identifies a policy from another project, a Hugging Face folder or a GGUF file.

    It is that of the content of the GGUF file, or that of the list of the folder's files with their SHA-256,
    without manifest.json.
    """
    return digest_file(source) if is_gguf(source) else digest_json(digest_tree(source, exclude=(MANIFEST,)))


def adopt(
    source: Path,
    folder: Path,
    *,
    dataset: str = "",
    code: str = "",
    origin: Mapping[str, Any] = MappingProxyType({}),
    notices: Sequence[Path] = (),
) -> Manifest:
    """Make the checkpoint `folder` from `source`, a Hugging Face folder or a GGUF file; return its manifest.

    The manifest is a record of the checkpoint's origin and of the digests of its files. The files of a folder
    are copied. The weights of a GGUF file are dequantised to float32. The version of a data set (`dataset`),
    the revision of the source code (`code`) and facts on the source (`origin`, for instance its licence) are
    recorded in the manifest. If `origin` is empty and the source is itself a checkpoint, the origin in its
    manifest is kept. `notices` are files, such as the text of a licence, that are added to the checkpoint.
    Raises UserError if transformers cannot read the source, or if the source has no chat template.
    """
    load_tokenizer(source)
    with atomic_folder(folder) as temporary:
        if is_gguf(source):
            _convert(source, temporary)
        else:
            with contextlib.suppress(
                OSError, ValueError, KeyError
            ):  # most folders have no manifest of this project
                origin = origin or Manifest.model_validate(read_json(source / MANIFEST)).params["origin"]
            shutil.copytree(source, temporary, copy_function=shutil.copyfile, dirs_exist_ok=True)
        for notice in notices:
            shutil.copyfile(notice, temporary / notice.name)
        files = digest_tree(temporary, exclude=(MANIFEST,))  # that of the source is replaced
        manifest = Manifest(
            stage="adopted",
            files=files,
            digest=digest_json(files),
            dataset=dataset,
            code=code,
            params={"origin": dict(origin)} if origin else {},
        )
        write_json(temporary / MANIFEST, manifest.model_dump())
    verify_checkpoint(folder)
    return manifest


def _convert(source: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to `folder` in Hugging Face's format.

    Raises UserError if transformers cannot read the file, or if tensors of the model are missing in it.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    with explain_load_errors(source, "model"):
        model, loading = AutoModelForCausalLM.from_pretrained(
            **load_arguments(source),
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    if missing := sorted(loading["missing_keys"]):  # transformers has filled them with random numbers
        raise UserError(
            f"{source}: {len(missing)} tensors of the model are not in it, such as {missing[0]}; give a "
            "whole GGUF file."
        )
    # transformers keeps it, although no tensor is quantised any more.
    vars(model.config).pop("quantization_config", None)
    write_model(folder, model)
    load_tokenizer(source).save_pretrained(folder)


def adopted(source: Path, parent: Path) -> Path:
    """Return the folder of a checkpoint of `source` below `parent`, made unless an earlier call made it.

    `source` is a Hugging Face folder or a GGUF file. The name of the checkpoint's folder is the first 12
    digits of the source's SHA-256 (`source_digest`). Of several processes that call this at once, one makes
    the checkpoint, and the others wait. Raises UserError if transformers cannot read the source, or if it has
    no chat template.
    """
    folder = parent / source_digest(source)[:12]
    with locked(parent / "lock"):
        if not (folder / MANIFEST).is_file():
            adopt(source, folder)
    return folder
