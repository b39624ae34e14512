"""Bring work pools, the limit of one run per home, deployments and automations to a Prefect server.

    infra/prefect/deploy.sh [PARAMETER=VALUE]...    change parameters of every deployment; safe to repeat

The server is that of PREFECT_API_URL, and prefect.yaml, pools.yaml and automations.yaml say what it gets. A
bad profile, parameter, pool or block is refused before anything changes there. Variables and their defaults,
which also stand for variables that are empty:

    CUDA_AGENT_PROFILE   profile of every deployment (h20-pool)
    CUDA_AGENT_POOL      work pool of nights and data sets (gpu-h20); approvals are in the pool cpu
    CUDA_AGENT_HOME      home (.cuda-agent of this folder; with Kubernetes /srv/cuda-agent)
    CUDA_AGENT_CRON      schedule of the nights (0 1 * * *)
    CUDA_AGENT_TIMEZONE  time zone of every schedule (UTC)
    CUDA_AGENT_WORKERS   process: workers run flows on their own machine; kubernetes: as jobs (process)
    CUDA_AGENT_ALERT     notification block that receives alarms as TYPE/NAME (none: alarms are events only)
    RAY_ADDRESS          Ray cluster of the flow runs
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from components.core.config import PROJECT, resolve
from components.core.errors import UserError, refuse

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

HERE = Path(__file__).resolve().parent
DEFAULTS = {
    "CUDA_AGENT_PROFILE": "h20-pool",
    "CUDA_AGENT_POOL": "gpu-h20",
    "CUDA_AGENT_CRON": "0 1 * * *",
    "CUDA_AGENT_TIMEZONE": "UTC",
    "CUDA_AGENT_WORKERS": "process",
}


def main(assignments: list[str]) -> None:
    """Deploy with the parameters `assignments`, each as PARAMETER=VALUE.

    Raises UserError if one of them or a variable is wrong, and if no server answers.
    """
    url = os.environ.get("PREFECT_API_URL", "")
    unset = (
        "PREFECT_API_URL is not set: start a server that stays (prefect server start) and name its address"
    )
    refuse((not url, f"{unset}."))
    environment = variables()
    workers = environment["CUDA_AGENT_WORKERS"]
    environment["CUDA_AGENT_SETS"] = shlex.join(assignments)
    homes = [assignment for assignment in assignments if assignment.startswith("home=")]
    refuse((homes, f"{homes}: the home of deployments is the variable CUDA_AGENT_HOME; set it."))
    resolve(environment["CUDA_AGENT_PROFILE"], tuple(assignments))
    templates = job_templates(workers, environment["CUDA_AGENT_HOME"])
    pool = environment["CUDA_AGENT_POOL"]
    refuse((pool not in templates, f"CUDA_AGENT_POOL: pools.yaml has no work pool {pool}."))

    # Their import takes seconds.
    import httpx
    from prefect.client.orchestration import get_client

    try:
        with get_client(sync_client=True) as client:
            types = {pool.name: pool.type for pool in client.read_work_pools()}
            for name in templates:
                # Prefect would keep the type of a pool that exists, and say that it updated it.
                refuse(
                    (
                        types.get(name, workers) != workers,
                        f"Work pool {name} is of type {types.get(name)}, which cannot change; run prefect "
                        f"work-pool delete {name} first.",
                    )
                )
            automations = _automations(client, environment.get("CUDA_AGENT_ALERT", ""))
            for name, template in templates.items():
                _bring_pool(client, name, workers, template, is_new=name not in types)
            client.upsert_global_concurrency_limit_by_name("cuda-agent-home", limit=1)
            _deploy(environment)
            for automation in automations:
                _bring_automation(client, automation)
    except httpx.TransportError as error:
        raise UserError(
            f"PREFECT_API_URL: no Prefect server answers at {url} ({error}); start it (prefect server start)."
        ) from error


def variables() -> dict[str, str]:
    """Return the environment of this process with the variables that prefect.yaml names."""
    given = {name: value for name, value in os.environ.items() if value or not name.startswith("CUDA_AGENT_")}
    environment = DEFAULTS | given | {"COLUMNS": "500", "PREFECT_CLI_COLORS": "false"}
    # Workers and pods start in another working directory, so the home is absolute.
    is_kubernetes = environment["CUDA_AGENT_WORKERS"] == "kubernetes"
    default = "/srv/cuda-agent" if is_kubernetes else str(PROJECT / ".cuda-agent")
    environment["CUDA_AGENT_HOME"] = str((PROJECT / environment.get("CUDA_AGENT_HOME", default)).resolve())
    return environment


def pools() -> dict[str, Any]:
    """Return the contents of pools.yaml."""
    settings: dict[str, Any] = yaml.safe_load((HERE / "pools.yaml").read_text())
    return settings


def job_templates(workers: str, home: str) -> dict[str, Any]:
    """Return the base job template of each work pool in pools.yaml, by the pool's name.

    It is process.json or kubernetes.json, as `workers` says, in which the values that pools.yaml sets for the
    pool are the defaults. The environment of flow runs also gets the place of Prefect's cached results, which
    is in the folder `home` so that another worker finds them, and this process's RAY_ADDRESS if it is set.
    Raises UserError if there is no such template, or if pools.yaml sets a variable that it does not have.
    """
    settings, file = pools(), HERE / f"{workers}.json"
    refuse((not file.is_file(), f"CUDA_AGENT_WORKERS={workers}: give process or kubernetes."))
    added = {name: os.environ[name] for name in ("RAY_ADDRESS",) if name in os.environ}
    added["PREFECT_RESULTS_LOCAL_STORAGE_PATH"] = f"{home}/prefect/results"
    templates = {}
    for name, pool in settings["pools"].items():
        templates[name] = json.loads(file.read_text())
        variables = templates[name]["variables"]["properties"]
        values = pool["kubernetes"] if workers == "kubernetes" else {}
        for variable, value in (values | {"env": settings["environment"] | added}).items():
            refuse(
                (
                    variable not in variables,
                    f"pools.yaml: pool {name} sets {variable}, which {file.name} does not know; "
                    f"give one of {', '.join(variables)}.",
                )
            )
            variables[variable]["default"] = value
    return templates


def _automations(client: SyncPrefectClient, alert: str) -> list[dict[str, Any]]:
    """Return the automations of automations.yaml, whose alarms go through the notification block `alert`.

    `alert` is TYPE/NAME, or empty if alarms are events only. Raises UserError if there is no such block.
    """
    from prefect.exceptions import ObjectNotFound

    text = (HERE / "automations.yaml").read_text()
    if alert:
        kind, _, name = alert.partition("/")
        try:
            block = client.read_block_document_by_name(name, kind)
        except ObjectNotFound as error:
            raise UserError(
                f"CUDA_AGENT_ALERT: the server has no block {alert}; make one (prefect block create "
                "slack-webhook)."
            ) from error
        text = text.replace("*event", "*alert").replace("BLOCK", str(block.id))
    automations: list[dict[str, Any]] = yaml.safe_load(text)["automations"]
    return automations


def _bring_pool(
    client: SyncPrefectClient, name: str, workers: str, template: dict[str, Any], *, is_new: bool
) -> None:
    """Make the work pool `name`, or give the existing one the job template and the description."""
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate

    values = {"base_job_template": template, "description": pools()["pools"][name]["description"]}
    if is_new:
        client.create_work_pool(WorkPoolCreate(name=name, type=workers, **values))
    else:
        client.update_work_pool(name, WorkPoolUpdate(**values))
    print(f"work pool {name}")


def _deploy(environment: dict[str, str]) -> None:
    """Bring the deployments of prefect.yaml to the server by Prefect's own command, and print what it prints.

    Raises UserError unless all are accepted: Prefect skips one with an invalid field and still exits with 0.
    """
    wanted = len(yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"])
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n")
    accepted = done.stdout.count("' successfully ")
    refuse(
        (
            done.returncode != 0 or accepted != wanted,
            f"prefect.yaml: {accepted} of {wanted} deployments were accepted; mend what Prefect says above.",
        )
    )


def _bring_automation(client: SyncPrefectClient, automation: dict[str, Any]) -> None:
    """Make an automation, or replace the one with its name; further ones with this name are deleted."""
    from prefect.events.schemas.automations import AutomationCore

    wanted = AutomationCore.model_validate(automation)
    existing = [found.id for found in client.read_automations_by_name(wanted.name)]
    if existing:
        client.update_automation(existing[0], wanted)
    else:
        client.create_automation(wanted)
    for other in existing[1:]:
        client.delete_automation(other)
    print(f"automation {wanted.name}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--help"]:
        print(__doc__)
        sys.exit()
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
