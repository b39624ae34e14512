"""Find the run keys and digests to which the registry refers, whose objects the store must keep."""

from mlflow import MlflowClient
from mlflow.utils import get_results_from_paginated_fn

from components.registry.audit import AuditChain
from components.registry.models import aliases
from components.registry.tracking import KIND, RUN_KEY
from components.storage.gc import words

PAGE = 500


def references(client: MlflowClient, model: str) -> dict[str, str]:
    """Return the run keys and digests of versions with an alias and of unfinished runs.

    The value of each is the reason to keep its objects, such as "policy version 3 is champion".
    """
    found: dict[str, str] = {}
    versions = {
        str(version.version): version
        for version in client.search_model_versions(f"name = '{model}'", max_results=10_000)
    }
    for alias, number in aliases(client, model).items():
        found |= dict.fromkeys(_named(versions[number].tags), f"{model} version {number} is {alias}")
    unfinished = _unfinished(client)
    for version in versions.values():
        if version.tags.get(RUN_KEY) in unfinished:
            found |= dict.fromkeys(_named(version.tags), "a night that is not finished")
    return found | dict.fromkeys(unfinished, "a night that is not finished")


def evidence(chain: AuditChain) -> dict[str, str]:
    """Return every run key and digest that an audit entry contains.

    The value of each names the entry, such as "audit entry 12". The objects are kept because they are the
    evidence of past decisions.
    """
    return {
        word: f"audit entry {entry.number}"
        for entry in chain.entries()
        for word in words(entry.model_dump_json())
    }


def _named(tags: dict[str, str]) -> list[str]:
    return [
        tags[name]
        for name in (RUN_KEY, "checkpoint.digest", "dataset.version", "evaluation.digest")
        if tags.get(name)
    ]


def _unfinished(client: MlflowClient) -> set[str]:
    """Return the run keys of pipeline runs that are not finished, because they are running or have failed."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    rule = f"tags.`{KIND}` = 'night' and attributes.status != 'FINISHED'"
    runs = get_results_from_paginated_fn(
        lambda size, token: client.search_runs(experiments, rule, max_results=size, page_token=token), PAGE
    )
    return {run.data.tags[RUN_KEY] for run in runs if RUN_KEY in run.data.tags}
