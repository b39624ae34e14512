"""Find the policy that `--policy` names: a chat server, a folder, or a registered version."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from components.cli.common import home_of
from components.core.errors import UserError

if TYPE_CHECKING:
    from components.agent.policies import Policy
    from components.core.config import Resolved


def find_policy(name: str, server_model: str, resolved: Resolved) -> Policy:
    """Return the policy that `name` names, which is the value of `--policy`.

    `name` is the address of a server, a folder, or the alias or number of a registered version.
    `server_model` is the value of `--model`. Raises UserError if there is no such policy.
    """
    from components.agent.policies import folder_policy, server_policy

    params = resolved.params
    # Prompt and context window are those of the policy's manifest, unless the user sets them with `--set`.
    explicit = frozenset(key for key, source in resolved.sources.items() if source.startswith("--set"))
    if name.startswith(("http://", "https://")):
        from components.policy.chat_client import ChatClient

        client = ChatClient(name, server_model)
        client.choose_model()
        return server_policy(client, params, explicit)
    if server_model:
        raise UserError(
            f"--model {server_model}: only a server has several models; give its address with --policy."
        )
    if Path(name).is_dir():
        return folder_policy(Path(name), params, explicit)
    if name.isdigit() or name in ("champion", "candidate", "previous"):
        return folder_policy(_registered_checkpoint(name, resolved), params, explicit)
    raise UserError(
        f"--policy {name}: no such folder; give champion, a version's number, a folder, or an address "
        "such as http://localhost:8000/v1."
    )


def _registered_checkpoint(name: str, resolved: Resolved) -> Path:
    """Return the folder with the checkpoint of a registered version.

    The checkpoint is downloaded into the home when it is used for the first time.
    """
    from components.cli.models import registry_client
    from components.core.files import atomic_folder
    from components.policy.checkpoint import verify_checkpoint
    from components.registry import models

    client, model = registry_client(resolved), resolved.params.registry.model
    number = models.aliases(client, model).get(name, name)
    if not number.isdigit():
        raise UserError(
            f"--policy {name}: {model} has no {name} yet; cuda-agent models list shows all versions."
        )
    run = models.describe(client, model, number)["run_id"]
    folder = home_of(resolved) / "policies" / f"{model}-{number}-{run[:8]}"
    if not (folder / "manifest.json").is_file():
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        with atomic_folder(folder) as temporary:
            download = temporary / "download"
            shutil.copytree(models.checkpoint(client, model, number, download), temporary, dirs_exist_ok=True)
            shutil.rmtree(download, ignore_errors=True)
    verify_checkpoint(folder)
    return folder
