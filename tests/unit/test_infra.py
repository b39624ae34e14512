"""Claims about the manifests of infra/: kustomizations and deployments are valid, and true to the project.

No package has KubeRay's schema, so the fields of a RayCluster that are used are typed here.
"""

import asyncio
import itertools
import json
import re
import runpy
import shlex
import shutil
import subprocess
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect_fixtures import job_templates
from public_models import PROFILE_MODELS, public_shapes
from pydantic import BaseModel, ConfigDict, ValidationError

from components.core.config import PROJECT, resolve
from components.planning.role_memory import tensor_parallel

INFRA = PROJECT / "infra"
OVERLAYS = ("cpu", "h20")
LEAST = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "Unconfined"},
    "appArmorProfile": {"type": "Unconfined"},
    "procMount": "Unmasked",
}
"""Capabilities that the judge needs of its container in a pod with a user namespace."""


def rendered(overlay: str) -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl (it renders kustomizations) is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", str(INFRA / "kustomize" / "overlays" / overlay)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_kustomize_renders_is_valid_kubernetes(overlay: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    documents = rendered(overlay)
    for document in documents:
        if document["apiVersion"] != "ray.io/v1":
            validate.validate(document, "1.31", strict=True)
        assert document["kind"] == "Namespace" or document["metadata"].get("namespace") == "cuda-agent"
    kinds = {document["kind"] for document in documents}
    assert kinds >= {
        "Deployment",
        "Service",
        "Job",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "ServiceAccount",
        "Role",
    }


class Fields(BaseModel):
    """Fields of ray.io/v1 in KubeRay's repository, ray-operator/config/crd/bases/ray.io_rayclusters.yaml."""

    model_config = ConfigDict(extra="forbid", strict=True)


class HeadGroup(Fields):
    template: dict[str, Any]
    rayStartParams: dict[str, str] = {}


class WorkerGroup(HeadGroup):
    groupName: str
    minReplicas: int
    maxReplicas: int
    replicas: int


class RayClusterSpec(Fields):
    headGroupSpec: HeadGroup
    rayVersion: str
    workerGroupSpecs: list[WorkerGroup]


def test_the_ray_cluster_has_only_fields_and_types_of_kuberays_schema() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    clusters = [document for document in rendered("h20") if document["apiVersion"] == "ray.io/v1"]
    assert [cluster["kind"] for cluster in clusters] == ["RayCluster"]
    assert clusters[0].keys() == {"apiVersion", "kind", "metadata", "spec"}
    spec = RayClusterSpec.model_validate(clusters[0]["spec"])
    for group in (spec.headGroupSpec, *spec.workerGroupSpecs):
        metadata = {"name": "ray"} | group.template["metadata"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": group.template["spec"]}
        validate.validate(pod, "1.31", strict=True)
    for group in spec.workerGroupSpecs:
        assert group.minReplicas <= group.replicas <= group.maxReplicas
    for wrong in ({"rayStartParams": {"num-cpus": 0}}, {"replica": 10}, {"minReplicas": "10"}):
        with pytest.raises(ValidationError):
            WorkerGroup.model_validate(spec.workerGroupSpecs[0].model_dump() | wrong)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_pods_refer_to_is_there_or_is_a_secret_that_the_base_names(overlay: str) -> None:
    documents = rendered(overlay)
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    base = (INFRA / "kustomize" / "base" / "kustomization.yaml").read_text()
    text = json.dumps(documents)
    for secret in set(re.findall(r'"secretKeyRef": \{"key": "[\w-]+", "name": "([\w-]+)"', text)) | set(
        re.findall(r'"secretRef": \{"name": "([\w-]+)"', text)
    ):
        assert secret in base and ("Secret", secret) not in names, "secrets are named, never written here"
    for config in set(re.findall(r'"configMapRef": \{"name": "([\w-]+)"', text)):
        assert ("ConfigMap", config) in names
    for account in set(re.findall(r'"serviceAccountName": "([\w-]+)"', text)):
        assert ("ServiceAccount", account) in names


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_named_by_a_network_policy_and_nothing_is_open_by_default(overlay: str) -> None:
    documents = rendered(overlay)
    policies = [document["spec"] for document in documents if document["kind"] == "NetworkPolicy"]
    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in policies
    selectors = json.dumps([policy["podSelector"] for policy in policies])
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet", "Job"):
            component = document["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
            assert f'"{component}"' in selectors, component
    flow = json.loads((INFRA / "prefect" / "kubernetes.json").read_text())["job_configuration"][
        "job_manifest"
    ]["spec"]["template"]
    assert flow["metadata"]["labels"]["app.kubernetes.io/component"] == "flow" and '"flow"' in selectors


def test_only_judges_are_unconfined_and_h20s_are_chosen_by_label() -> None:
    documents = rendered("h20")
    for document in documents:
        if document["kind"] in ("Deployment", "StatefulSet", "Job"):
            for container in document["spec"]["template"]["spec"]["containers"]:
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, document[
                    "metadata"
                ]["name"]
                assert container["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, document[
                    "metadata"
                ]["name"]
    (ray,) = (document for document in documents if document["kind"] == "RayCluster")
    for group in ray["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H20"}
        assert (
            pod["containers"][0]["securityContext"] == LEAST
            and pod["hostUsers"] is False
            and pod["securityContext"]["runAsUser"] == 10001
        )


def gpus(pod: dict[str, Any]) -> int:
    return sum(int(one["resources"]["limits"]["nvidia.com/gpu"]) for one in pod["containers"])


def test_the_gpus_of_the_groups_are_those_of_the_pool() -> None:
    documents = {(document["kind"], document["metadata"]["name"]): document for document in rendered("h20")}
    params = resolve("h20-pool").params
    groups = {
        group["groupName"]: group["replicas"] * gpus(group["template"]["spec"])
        for group in documents["RayCluster", "pool"]["spec"]["workerGroupSpecs"]
    }
    sampler = documents["StatefulSet", "sampler"]["spec"]
    groups["samplers"] = sampler["replicas"] * gpus(sampler["template"]["spec"])
    pool = params.pool.model_dump(include={"trainers", "samplers", "judges"})
    assert groups == pool and sum(groups.values()) == 128
    for group in documents["RayCluster", "pool"]["spec"]["workerGroupSpecs"]:
        offered = json.loads(json.loads(group["rayStartParams"]["resources"]))
        assert offered == {"H20": gpus(group["template"]["spec"])}

    # Each server has the tensor parallelism of the plan, the whole context, and an address in the profile.
    planned = tensor_parallel(params, public_shapes(PROFILE_MODELS["h20-pool"]))
    (container,) = sampler["template"]["spec"]["containers"]
    assert f"--tensor-parallel-size={planned}" in container["args"]
    assert gpus(sampler["template"]["spec"]) == planned
    assert sampler["replicas"] * planned == params.pool.samplers
    assert f"--max-model-len={params.policy.context}" in container["args"]
    sets = deploy_arguments("h20")[1:]
    given = resolve("h20-pool", tuple(sets)).params
    service = documents["Service", sampler["serviceName"]]
    (port,) = service["spec"]["ports"]
    assert given.policy.servers == [
        f"http://sampler-{index}.{service['metadata']['name']}:{port['port']}"
        for index in range(sampler["replicas"])
    ]
    assert given.pool.resource == "H20" and given.policy.source == container["args"][0]


def deploy_arguments(overlay: str) -> list[str]:
    (job,) = (document for document in rendered(overlay) if document["kind"] == "Job")
    arguments: list[str] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return arguments


def test_jobs_of_the_kubernetes_pools_are_valid_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    templates = job_templates("kubernetes")
    for template, root in itertools.product(templates.values(), (False, True)):
        values = {name: spec.get("default") for name, spec in template["variables"]["properties"].items()}
        values |= json.loads((INFRA / "prefect" / "kubernetes-root.json").read_text()) if root else {}
        given = values | {
            "name": "night",
            "command": ["prefect", "flow-run", "execute"],
            "env": [{"name": "A", "value": "b"}],
        }

        def fill(node: Any, given: dict[str, Any] = given) -> Any:
            if isinstance(node, dict):
                return {key: fill(value) for key, value in node.items()}
            if isinstance(node, list):
                return [fill(value) for value in node]
            whole = re.fullmatch(r"\{\{ (\w+) \}\}", node) if isinstance(node, str) else None
            if whole:
                return given[whole[1]]
            return (
                re.sub(r"\{\{ (\w+) \}\}", lambda found: str(given[found[1]]), node)
                if isinstance(node, str)
                else node
            )

        job = fill(template["job_configuration"]["job_manifest"])
        # prefect-kubernetes refuses a template without these two, which the cluster ignores: they belong
        # one level up.
        assert (
            job["spec"]["template"]["spec"].pop("completions")
            == job["spec"]["template"]["spec"].pop("parallelism")
            == 1
        )
        validate.validate(job, "1.31", strict=True)
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        if root:
            assert pod["hostUsers"] is True and set(container["securityContext"]["capabilities"]["add"]) >= {
                "SYS_ADMIN",
                "SYS_PTRACE",
            }
        else:
            assert pod["hostUsers"] is False and container["securityContext"] == LEAST


def test_prefects_kubernetes_worker_accepts_the_templates() -> None:
    worker = pytest.importorskip(
        "prefect_kubernetes.worker", reason="the extra `kubernetes` is not installed"
    )
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun

    async def manifest(template: dict[str, Any]) -> dict[str, Any]:
        # The client is only asked for blocks that a template names, and these name none.
        client = PrefectClient("http://127.0.0.1:9/api")
        configuration = await worker.KubernetesWorkerJobConfiguration.from_template_and_values(
            template, {}, client=client
        )
        configuration.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="night"))
        found: dict[str, Any] = configuration.job_manifest
        return found

    for template in job_templates("kubernetes").values():
        job = asyncio.run(manifest(template))
        (container,) = job["spec"]["template"]["spec"]["containers"]
        given = {item["name"]: item["value"] for item in container["env"]}
        assert given["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30" and container["args"][:2] == [
            "prefect",
            "flow-run",
        ]
        assert job["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == "flow", (
            "network policies go by it"
        )


@pytest.mark.parametrize("where", ["compose", "one-host", *OVERLAYS])
def test_deploy_is_called_with_parameters_that_exist(where: str) -> None:
    from components.core.config import KNOWN

    if where == "compose":
        arguments = yaml.safe_load((INFRA / "compose.yaml").read_text())["services"]["deploy"]["command"]
    elif where == "one-host":
        script = (INFRA / "one-host.sh").read_text()
        subprocess.run(["bash", "-n", INFRA / "one-host.sh"], check=True)
        call = re.search(r"(infra/prefect/deploy\.sh .*)\"\$@\"", script, re.DOTALL)[1]
        arguments = shlex.split(call.replace("\\\n", ""))
    else:
        arguments = deploy_arguments(where)
    assert (PROJECT / arguments[0]).is_file()
    for argument in arguments[1:]:
        assert argument.partition("=")[0] in KNOWN, argument


@pytest.mark.parametrize("workers", ["process", "kubernetes"])
def test_an_empty_variable_of_deploy_has_its_default(monkeypatch: pytest.MonkeyPatch, workers: str) -> None:
    """An empty home would otherwise be the folder of the project, and an empty profile that of no pool."""
    deploy = runpy.run_path(str(INFRA / "prefect" / "deploy.py"))
    names = [*deploy["DEFAULTS"], "CUDA_AGENT_HOME", "CUDA_AGENT_ALERT"]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_AGENT_WORKERS", workers)
    unset = deploy["variables"]()
    for name in names:
        monkeypatch.setenv(name, workers if name == "CUDA_AGENT_WORKERS" else "")
    assert deploy["variables"]() == unset
    home = "/srv/cuda-agent" if workers == "kubernetes" else str(PROJECT / ".cuda-agent")
    assert unset["CUDA_AGENT_HOME"] == home and unset["CUDA_AGENT_PROFILE"] == "h20-pool"
