"""Claims about the files of infra/ other than kustomizations: each is valid and names what exists.

That images build and that AWS accepts the plan is not tested: it needs a network.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.core.config import PROJECT

INFRA = PROJECT / "infra"


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((INFRA / "compose.yaml").read_text())
    return loaded


def test_compose_keeps_its_schema() -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        str(INFRA / "compose.yaml"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_names_only_variables_files_services_and_volumes_that_exist() -> None:
    text, stack = (INFRA / "compose.yaml").read_text(), compose()
    known = set(re.findall(r"^(\w+)=", (INFRA / "example.env").read_text(), re.MULTILINE))
    assert set(re.findall(r"\$\{(\w+)", text)) <= known
    for name, service in stack["services"].items():
        for needed in service.get("depends_on", {}):
            assert needed in stack["services"], name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (INFRA / source).exists() if source.startswith(".") else source in stack["volumes"], volume
        build = service.get("build")
        assert build is None or (PROJECT / build["dockerfile"]).is_file()
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} would be open to the network"
    for worker in ("worker-cpu", "worker-gpu"):
        service = stack["services"][worker]
        assert service["cap_drop"] == ["ALL"] and service["user"] == "10001:10001"
        assert {"seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined"} <= set(
            service["security_opt"]
        )
    assert not any("cap_add" in service for service in stack["services"].values()), (
        "nothing needs a capability"
    )
    assert not any(
        "security_opt" in service
        for name, service in stack["services"].items()
        if not name.startswith("worker")
    )


def test_terraform_parses_and_uses_what_it_declares() -> None:
    hcl2 = pytest.importorskip("hcl2", reason="python-hcl2 is not installed")
    files = sorted((INFRA / "terraform").glob("*.tf"))
    text = "".join(path.read_text() for path in files)
    for path in files:
        with path.open() as file:
            assert hcl2.load(file), path
    declared = set(re.findall(r'^variable "(\w+)"', text, re.MULTILINE))
    assert set(re.findall(r"\bvar\.(\w+)", text)) == declared
    resources = {".".join(found) for found in re.findall(r'^resource "(\w+)" "(\w+)"', text, re.MULTILINE)}
    assert {
        ".".join(found) for found in re.findall(r"\b(aws_\w+)\.(\w+)", text.replace("data.aws", "data_aws"))
    } <= resources
    assert {"aws_s3_bucket.store", "aws_db_instance.services", "aws_iam_role.account"} <= resources


def test_terraform_is_formatted() -> None:
    if shutil.which("terraform") is None:
        pytest.skip("terraform is not installed")
    done = subprocess.run(
        ["terraform", "fmt", "-check", "-recursive", str(INFRA / "terraform")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "path", sorted((INFRA / "containers").glob("*.Containerfile")), ids=lambda path: path.stem
)
def test_containerfiles_copy_what_exists_and_install_extras_that_exist(path: Path) -> None:
    text = path.read_text()
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"--extra (\w+)", text)) <= set(extras)
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((PROJECT / source).exists() for source in sources.split())
    ignored = (PROJECT / ".dockerignore").read_text().split()
    assert {".venv/", ".cuda-agent/", "infra/.env"} <= set(ignored), (
        "what belongs to this machine stays out of images"
    )
    for words in re.findall(r"^(?:CMD|ENTRYPOINT) (.+)$", text, re.MULTILINE):
        assert isinstance(json.loads(words), list)
    if path.stem != "vllm":
        assert "bubblewrap" in text and "libseccomp2" in text and "g++" in text


def test_prometheus_reads_rules_that_are_rules() -> None:
    rules = yaml.safe_load((INFRA / "prometheus" / "alerts.yaml").read_text())
    for rule in rules["groups"][0]["rules"]:
        assert set(rule) == {"alert", "expr", "labels", "annotations"} and rule["expr"].count("(") == rule[
            "expr"
        ].count(")")
    assert yaml.safe_load((INFRA / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"]
