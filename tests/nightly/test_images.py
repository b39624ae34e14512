"""Claims about the start commands of the images: what this machine can check of them holds."""

import sys
from pathlib import Path

import pytest

from components.core.config import PROJECT

sys.path.insert(0, str(PROJECT / "infra"))
import check_images


@pytest.mark.timeout(300)
def test_every_start_command_is_accepted_by_its_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_images.main() == 0, capsys.readouterr().err
    lines = capsys.readouterr().out.splitlines()
    unchecked = {line.split()[2] for line in lines if line.startswith("not checked")}
    assert unchecked <= {"cuda-agent/vllm"} and len(lines) > 10


@pytest.mark.parametrize(
    ("image", "command", "why"),
    [
        ("orchestrator", "tini -- prefect worker start --poool cpu", "no option --poool"),
        ("orchestrator", "tini -- prefect wroker start", "prefect wroker start --help fails"),
        ("orchestrator", "python infra/swift/none.py --port=1", "--help fails"),
        (
            "vllm",
            "vllm serve --worker-extension-cls components.policy.vllm.worker.Nobody",
            "has no attribute",
        ),
        # The image has only components/policy, so what that does not hold cannot be imported.
        ("vllm", "vllm serve --worker-extension-cls components.core.params.Params", "components.core"),
    ],
)
def test_a_wrong_start_command_is_found(image: str, command: str, why: str) -> None:
    start = check_images.Start(f"cuda-agent/{image}", "test", tuple(command.split()))
    result, found = check_images.check(start)
    assert result == "wrong" and why in found


def test_the_vllm_image_copies_what_the_extension_of_its_workers_imports() -> None:
    assert check_images.missing_files() == []
    name = "components.policy.vllm.worker.Fingerprint"
    assert check_images.import_problem("cuda-agent/vllm", name) == ""
    text = (Path(PROJECT) / "infra" / "containers" / "vllm.Containerfile").read_text()
    assert "VLLM_SERVER_DEV_MODE=1" in text and '"ray>=' in text and "HEALTHCHECK" in text
