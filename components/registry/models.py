"""Model versions in MLflow: one registered model, with a version for each run and aliases for the champion.

The champion is the promoted version. A version is a logged model that has the files of a checkpoint in its
folder `checkpoint`, which transformers and vLLM load directly. A version is registered without loading its
model. MLflow's transformers flavor is not used, because it needs the model in memory and does not accept
paths with transformers 5. The tags of a version are copies of its evidence: the figure and threshold of every
gate (condition of promotion), and the digests of the data set, the code and the evaluation. The evidence on
which decisions rest is in the audit chain (audit.py). Each of the aliases candidate, champion and previous
points to one version, so there is never more than one champion.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from mlflow.exceptions import MlflowException
from mlflow.utils import get_results_from_paginated_fn
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.uri import is_local_uri

from components.core.errors import UserError
from components.registry.audit import DECISIONS, AuditChain, AuditEntry
from components.registry.gates import Decision, Gate
from components.registry.tracking import KIND, RUN_KEY
from components.storage.gc import words

CANDIDATE, CHAMPION, PREVIOUS = "candidate", "champion", "previous"
DECISION = "gate.verdict"
# Tag of the registered model that names the newest entry of the audit chain.
ANCHOR = "audit.anchor"
# Folder of a version with the files of its checkpoint.
CHECKPOINT = "checkpoint"
# Number of runs that are read from MLflow at once.
PAGE = 500


def register(
    client: MlflowClient,
    *,
    model: str,
    run_key: str,
    run_id: str,
    experiment_id: str,
    checkpoint: Path,
    tags: Mapping[str, str],
    figures: Mapping[str, float],
) -> str:
    """Register a checkpoint as a model version, and return the number of the version.

    The version gets the `tags`, and each number in `figures` as a tag `figure.NAME`. `checkpoint` is the
    folder of the checkpoint, and `run_id` the id of the MLflow run that made it. `run_key` is the key of the
    pipeline run, a digest of its parameters and code (`PipelineRun` in flows/run_context.py). If this
    pipeline run already has a version of this checkpoint, nothing is registered and the number of that
    version is returned. A version of another checkpoint is left as it is: the run has trained again, or a run
    with an equal key, in another home, has registered it.
    """
    try:
        client.create_registered_model(model)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    found = client.search_model_versions(f"name = '{model}' and tag.`{RUN_KEY}` = '{run_key}'")
    sealed = [name for name in ("checkpoint.digest", "manifest.digest") if name in tags]
    equal = [one for one in found if all(one.tags.get(name) == tags[name] for name in sealed)]
    if equal:
        return str(min(int(version.version) for version in equal))
    logged = client.create_logged_model(
        experiment_id, name="policy", source_run_id=run_id, model_type="checkpoint", tags={RUN_KEY: run_key}
    )
    client.log_model_artifacts(logged.model_id, str(checkpoint), CHECKPOINT)
    client.finalize_logged_model(logged.model_id, "READY")
    version = client.create_model_version(
        model,
        source=f"models:/{logged.model_id}",
        run_id=run_id,
        model_id=logged.model_id,
        tags={RUN_KEY: run_key}
        | dict(tags)
        | {f"figure.{key}": f"{value:.6g}" for key, value in figures.items()},
    )
    return str(version.version)


def record_decision(client: MlflowClient, model: str, version: str, decision: Decision) -> None:
    """Write the results of the gates, the verdict and the reasons of a decision into tags of a model version.

    The gates are the conditions of promotion. `model` is the name of the registered model, and `version` the
    number of the version. Results of gates of an earlier decision that this one lacks are removed.
    """
    names = {f"gate.{gate.name}" for gate in decision.gates}
    for name in find(client, model, version).tags:
        if name.startswith("gate.") and name not in names:
            client.delete_model_version_tag(model, version, name)
    set_tags(
        client,
        model,
        version,
        {f"gate.{gate.name}": gate.model_dump_json() for gate in decision.gates}
        | {"gate.reasons": json.dumps(decision.reasons), DECISION: decision.verdict},
    )


def set_tags(client: MlflowClient, model: str, version: str, tags: Mapping[str, str]) -> None:
    for name, value in tags.items():
        client.set_model_version_tag(model, version, name, value)


def aliases(client: MlflowClient, model: str) -> dict[str, str]:
    """Return the version number of each alias of the registered model `model`; {} if there is no such model.

    The aliases are read from the registered model, because MLflow's search results do not contain them.
    """
    found = _registered(client, model)
    return {name: str(version) for name, version in found.aliases.items()} if found is not None else {}


def champion_besides(aliases: Mapping[str, str], version: str) -> str | None:
    """Return the version number of the champion with which `version` is compared, or None if there is none.

    The champion is the promoted version. `aliases` has the version number of each alias. If `version` is
    already the champion, for example in a run that continues after its promotion, the result is the version
    with the alias `previous`.
    """
    champion = aliases.get(CHAMPION)
    return aliases.get(PREVIOUS) if champion == version else champion


def decided_aliases(client: MlflowClient, model: str) -> dict[str, str]:
    """Return the version number of each of the aliases `champion` and `previous` in the registry.

    An alias that no version of the registered model `model` has is not a key.
    """
    found = aliases(client, model)
    return {alias: found[alias] for alias in (CHAMPION, PREVIOUS) if alias in found}


def anchor(client: MlflowClient, model: str) -> str:
    """Return the number and the digest of the newest audit entry that the registry names, or "" without one.

    `model` is the name of the registered model.
    """
    found = _registered(client, model)
    return str(found.tags.get(ANCHOR, "")) if found is not None else ""


def apply_entry(client: MlflowClient, model: str, entry: AuditEntry) -> AuditEntry:
    """Set the aliases and tags of the registered model `model` as an audit entry says, and return the entry.

    The tags are those with the decision on the version, and the anchor, which names the entry as the newest
    one. A version that was registered gets the alias candidate, and one that was decided on loses it. A
    version that another program has deleted gets neither. Repeating the call changes nothing.
    """
    actual, existing = aliases(client, model), numbers(client, model)
    for alias in (PREVIOUS, CHAMPION):
        wanted = entry.aliases.get(alias)
        if wanted is None and alias in actual:
            client.delete_registered_model_alias(model, alias)
        elif wanted in existing and actual.get(alias) != wanted:
            client.set_registered_model_alias(model, alias, wanted)
    if entry.action == "registered" and entry.version in existing:
        client.set_registered_model_alias(model, CANDIDATE, entry.version)
    if entry.action in DECISIONS and entry.version in existing:
        decision = {DECISION: entry.action, "decided.by": entry.who, "decided.when": entry.when}
        set_tags(client, model, entry.version, decision)
        if entry.action != "waiting" and actual.get(CANDIDATE) == entry.version:
            client.delete_registered_model_alias(model, CANDIDATE)
    client.set_registered_model_tag(model, ANCHOR, entry.anchor)
    return entry


def _registered(client: MlflowClient, model: str) -> Any:
    """Return MLflow's record of the registered model `model`, or None if it does not exist yet."""
    try:
        return client.get_registered_model(model)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def find(client: MlflowClient, model: str, version: str) -> Any:
    """Return MLflow's record of the version of `model` with this number or alias.

    Raises UserError if there is no such version, and MlflowException if MLflow fails.
    """
    number = aliases(client, model).get(version, version)
    try:
        # No database has the integers of larger numbers, and no version has the number 0.
        return client.get_model_version(model, number if len(number) < 10 else "0")
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise UserError(
            f"models: {model} has no version {version}; cuda-agent models list shows what there is."
        ) from error


def describe(client: MlflowClient, model: str, version: str) -> dict[str, Any]:
    """Return the version of `model` with this number or alias as a JSON record.

    The record has the name of the model, the number and the aliases of the version, the results of its gates
    (conditions of promotion), its decision ("undecided" without one) with the reasons, its other tags, and
    the id of its MLflow run. Raises UserError if there is no such version.
    """
    found = find(client, model, version)
    return {
        "name": model,
        "version": str(found.version),
        "aliases": {alias: at for alias, at in aliases(client, model).items() if at == str(found.version)},
        "gates": [
            Gate.model_validate_json(value).model_dump()
            for key, value in sorted(found.tags.items())
            if key.startswith("gate.") and key not in (DECISION, "gate.reasons")
        ],
        "decision": found.tags.get(DECISION, "undecided"),
        "reasons": json.loads(found.tags.get("gate.reasons", "[]")),
        "tags": {key: value for key, value in found.tags.items() if not key.startswith("gate.")},
        "run_id": found.run_id,
    }


def numbers(client: MlflowClient, model: str) -> list[str]:
    """Return the numbers of all versions of the registered model `model`, the newest first."""
    found = _all(client.search_model_versions, filter_string=f"name = '{model}'")
    return sorted((str(version.version) for version in found), key=int, reverse=True)


def location(client: MlflowClient, model: str, version: str) -> str:
    """Return the path of a version's checkpoint if it is a local folder, and its URI otherwise.

    `model` is the name of the registered model, and `version` the number of the version. The folder may be
    missing.
    """
    uri = client.get_model_version_download_uri(model, version)
    if uri.startswith("models:/"):
        uri = client.get_logged_model(uri.removeprefix("models:/")).artifact_location
    place = f"{uri.rstrip('/')}/{CHECKPOINT}"
    return str(local_file_uri_to_path(place)) if is_local_uri(place) else place


def checkpoint(client: MlflowClient, model: str, version: str, scratch: Path) -> Path:
    """Return a local folder with the checkpoint of the version with the number `version`.

    If MLflow stores the checkpoint in a local folder, that folder is returned. Otherwise the checkpoint is
    downloaded into the folder `scratch`. Raises UserError if the local folder does not exist.
    """
    place = location(client, model, version)
    if not is_local_uri(place):
        return Path(
            download_artifacts(artifact_uri=place, dst_path=str(scratch), tracking_uri=client.tracking_uri)
        )
    if not Path(place).is_dir():
        raise UserError(
            f"{place}: the checkpoint of version {version} is not there any more; "
            "restore the artifact store from its backup."
        )
    return Path(place)


def references(client: MlflowClient) -> dict[str, str]:
    """Return the run keys and digests whose stored objects must be kept, with the reason for each.

    The objects are those in the artifact store. A run key is the key of a pipeline run (`PipelineRun` in
    flows/run_context.py). The result has the run key and the digests of checkpoint, data set and evaluation
    of every version of a registered model that has an alias, waits for approval or is of an unfinished run,
    and the run key of every unfinished run. A reason is a text such as "policy version 3 is champion".
    """
    found: dict[str, str] = {}
    unfinished = _unfinished(client)
    named = {
        (model.name, str(number)): alias
        for model in _all(client.search_registered_models)
        for alias, number in model.aliases.items()
    }
    for version in _all(client.search_model_versions):
        state = named.get((version.name, str(version.version)), "")
        if state or version.tags.get(DECISION) == "waiting":
            reason = f"{version.name} version {version.version} is {state or 'waiting'}"
            found |= dict.fromkeys(_named(version.tags), reason)
        elif version.tags.get(RUN_KEY) in unfinished:
            found |= dict.fromkeys(_named(version.tags), "a night that is not finished")
    return found | dict.fromkeys(unfinished, "a night that is not finished")


def registered_models(client: MlflowClient) -> list[str]:
    """Return the names of all registered models."""
    return [model.name for model in _all(client.search_registered_models)]


def _all(search: Callable[..., Any], **rule: Any) -> list[Any]:
    """Return all pages of what the method `search` of MLflow's client finds with the arguments `rule`."""
    return list(
        get_results_from_paginated_fn(
            lambda size, token: search(max_results=size, page_token=token, **rule), PAGE
        )
    )


def evidence(chain: AuditChain) -> dict[str, str]:
    """Return every run key and digest in the entries of an audit chain, each with a text for its entry.

    The chain is the log of decisions on versions, and a run key is a digest of a pipeline run's parameters
    and code. Entries of registrations are left out. The text is such as "audit entry 12", and names the last
    entry that contains the key or digest. Objects in the artifact store with these keys and digests are kept,
    because past decisions rest on them. Raises AuditChainError if the chain was damaged.
    """
    return {
        word: f"audit entry {entry.number}"
        for entry in chain.entries()
        if entry.action != "registered"
        for word in words(entry.model_dump_json())
    }


def _named(tags: dict[str, str]) -> list[str]:
    return [
        tags[name]
        for name in (RUN_KEY, "checkpoint.digest", "dataset.version", "evaluation.digest")
        if tags.get(name)
    ]


def _unfinished(client: MlflowClient) -> set[str]:
    """Return the run keys of all pipeline runs that are not finished, because they are running or failed.

    A run key is a digest of the run's parameters and code, and the tag of the run in MLflow.
    """
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    rule = f"tags.`{KIND}` = 'night' and attributes.status != 'FINISHED'"
    runs = _all(client.search_runs, experiment_ids=experiments, filter_string=rule)
    return {run.data.tags[RUN_KEY] for run in runs if RUN_KEY in run.data.tags}
