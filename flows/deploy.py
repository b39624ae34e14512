"""Create or update work pools, limits, deployments and automations on a Prefect server."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import yaml
from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from pydantic import ValidationError

from components.core.config import PROJECT, resolve
from components.core.errors import UserError
from flows.automations import automations
from flows.run_context import HOME_SLOT

PREFECT = PROJECT / "infra" / "prefect"
Workers = Literal["process", "kubernetes"]
Record = dict[str, Any]


@dataclass(frozen=True)
class Choices:
    """The options of `cuda-agent deploy`: the type of the workers, and changes to the values of prefect.yaml.

    An empty value changes nothing. `pool` is the work pool of every deployment, `cron` the schedule of the
    nightly one, `alert` the notification block for alerts as TYPE/NAME, and `paused` switches all schedules
    off.
    """

    workers: Workers = "process"
    profile: str = ""
    sets: tuple[str, ...] = ()
    home: str = ""
    pool: str = ""
    cron: str = ""
    timezone: str = ""
    alert: str = ""
    paused: bool = False
    # Environment variables of every flow run as NAME=VALUE, for instance RAY_ADDRESS=ray://host:10001.
    variables: tuple[str, ...] = ()


def deploy(choices: Choices) -> Record:
    """Create or update the work pools, concurrency limit, deployments and automations on a Prefect server.

    The server is the one that PREFECT_API_URL names. A second call with the same choices changes nothing.
    Returns a dictionary for JSON with the server's address and its pools, deployments and automations. Raises
    UserError if PREFECT_API_URL is not set, if the server does not answer, or if a choice is not accepted.
    """
    url = PREFECT_API_URL.value()
    if not url:
        raise UserError(
            "PREFECT_API_URL is not set: deployments need a server that stays; "
            "start one (prefect server start) and name its address."
        )
    file = deployments_file(choices)
    with get_client(sync_client=True) as client:
        try:
            client.hello()
        except httpx.HTTPError as error:
            raise UserError(
                f"PREFECT_API_URL: no Prefect server answers at {url} ({error}); start it or fix the address."
            ) from error
        block = notification_block(choices.alert)
        pools = make_pools(client, choices.workers)
        client.upsert_global_concurrency_limit_by_name(HOME_SLOT, 1)
        make_deployments(file)
        names = make_automations(client, block)
        found = [
            client.read_deployment_by_name(f"{entry['name']}/{entry['name']}")
            for entry in file["deployments"]
        ]
    return {
        "server": url,
        "pools": pools,
        "deployments": [
            {
                "name": entry.name,
                "pool": entry.work_pool_name,
                "parameters": entry.parameters,
                "schedules": [
                    f"{getattr(item.schedule, 'cron', '')} {getattr(item.schedule, 'timezone', '')}"
                    for item in entry.schedules
                    if item.active
                ],
            }
            for entry in found
        ],
        "automations": names,
    }


def deployments_file(choices: Choices) -> Record:
    """Return the content of prefect.yaml with the choices applied.

    Raises UserError if a parameter, a schedule or the name of a work pool is not valid.
    """
    values: Record = yaml.safe_load((PROJECT / "prefect.yaml").read_text())
    values.pop("definitions", None)
    known = read_pools()
    for entry in values["deployments"]:
        parameters = entry["parameters"]
        parameters["profile"] = choices.profile or parameters["profile"]
        parameters["sets"] = [*parameters["sets"], *choices.sets]
        params = resolve(parameters["profile"], tuple(parameters["sets"])).params
        home = Path(choices.home or params.home).expanduser()
        # Workers and pods start in another working directory, so a relative home is made absolute.
        home = (
            home
            if home.is_absolute()
            else (Path("/srv/cuda-agent") if choices.workers == "kubernetes" else PROJECT / home)
        )
        parameters["home"] = str(home)
        # Prefect's cached results are stored in the home, so that another worker finds them.
        results = {"PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "prefect" / "results")}
        entry["work_pool"]["job_variables"] = {"env": environment() | results | pairs(choices.variables)}
        if choices.pool:
            entry["work_pool"]["name"] = choices.pool
        for schedule in entry["schedules"]:
            schedule["timezone"] = choices.timezone or schedule["timezone"]
            schedule["active"] = not choices.paused
            if entry["name"] == "nightly" and choices.cron:
                schedule["cron"] = choices.cron
            try:
                CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])
            except ValidationError as error:
                raise UserError(
                    f"schedule of {entry['name']}: {error.errors()[0]['msg']}; "
                    "give another with --cron or --timezone."
                ) from error
        if entry["work_pool"]["name"] not in known:
            raise UserError(
                f"prefect.yaml: {entry['name']} names the work pool {entry['work_pool']['name']}; "
                f"give one of {', '.join(known)}."
            )
    return values


def pairs(variables: Sequence[str]) -> dict[str, str]:
    """Return the NAME=VALUE words as a mapping. Raises UserError for a word of another form."""
    for variable in variables:
        if not re.fullmatch(r"[A-Za-z_]\w*=.*", variable):
            raise UserError(
                f"--env {variable}: NAME=VALUE is expected, for instance "
                "RAY_ADDRESS=ray://judges-head-svc:10001."
            )
    return {name: value for name, _, value in (variable.partition("=") for variable in variables)}


def environment() -> dict[str, str]:
    """Return the environment variables that infra/prefect/pools.yaml sets for every flow run."""
    return dict(yaml.safe_load((PREFECT / "pools.yaml").read_text())["environment"])


def read_pools() -> Record:
    return dict(yaml.safe_load((PREFECT / "pools.yaml").read_text())["pools"])


def base_job_template(pool: str, workers: Workers) -> Record:
    """Return the base job template of a work pool, which Prefect fills in to start a flow run.

    The template is the file infra/prefect/<workers>.json, in which the values that pools.yaml sets for the
    pool are the defaults. Raises UserError if pools.yaml sets a variable that the template does not have.
    """
    template: Record = json.loads((PREFECT / f"{workers}.json").read_text())
    variables = template["variables"]["properties"]
    values = {"env": environment()} | (
        read_pools()[pool].get("kubernetes", {}) if workers == "kubernetes" else {}
    )
    for name, value in values.items():
        if name not in variables:
            raise UserError(
                f"{PREFECT / 'pools.yaml'}: pool {pool} sets {name}, which {workers}.json does not know; "
                f"give one of {', '.join(variables)}."
            )
        variables[name]["default"] = value
    return template


def make_pools(client: SyncPrefectClient, workers: Workers) -> list[Record]:
    for name, pool in read_pools().items():
        try:
            present = client.read_work_pool(name).type
        except ObjectNotFound:
            present = workers
        if present != workers:
            raise UserError(
                f"work pool {name}: on the server it is of type {present}, which cannot change its type; "
                f"run prefect work-pool delete {name} first."
            )
        client.create_work_pool(
            WorkPoolCreate(
                name=name,
                type=workers,
                description=pool["description"],
                base_job_template=base_job_template(name, workers),
            ),
            overwrite=True,
        )
    return [{"name": name, "type": workers} for name in read_pools()]


def make_deployments(values: Record) -> None:
    """Create or update the deployments by running `prefect deploy --all` on a temporary prefect.yaml.

    `values` is the content of that file, as `deployments_file` returns it. Raises UserError if Prefect does
    not accept a deployment.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prefect.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "prefect", "--no-prompt"),
                *("deploy", "--all", "--prefect-file", str(path)),
            ],
            cwd=PROJECT,
            env=os.environ | {"PREFECT_API_URL": str(PREFECT_API_URL.value())},
            capture_output=True,
            text=True,
            check=False,
        )
    # Prefect skips a deployment with invalid fields and still exits with 0.
    missing = [
        entry["name"]
        for entry in values["deployments"]
        if f"'{entry['name']}/{entry['name']}' successfully" not in " ".join(done.stdout.split())
    ]
    if done.returncode or missing:
        raise UserError(
            f"prefect.yaml: {', '.join(missing) or 'a deployment'} was not accepted: "
            f"{' '.join((done.stdout + done.stderr).split())[-600:]}"
        )


def make_automations(client: SyncPrefectClient, block: Any) -> list[str]:
    wanted = automations(block)
    for automation in wanted:
        present = client.read_automations_by_name(automation.name)
        if present:
            client.update_automation(present[0].id, automation)
        else:
            client.create_automation(automation)
    return [automation.name for automation in wanted]


def notification_block(name: str) -> Any:
    """Return the id of the notification block with the name `type/name`, or None if the name is empty.

    Raises UserError if the server has no such block.
    """
    if not name:
        return None
    try:
        block: Any = Block.load(name)
        return block._block_document_id
    except ValueError as error:
        raise UserError(
            f"--alert {name}: the server has no such block; "
            "make one (prefect block create slack-webhook) and give it as type/name."
        ) from error
