"""Keys follow meaning: what changes no result, or cannot be read by a stage, does not change its key."""

import os
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, Field

from components.core import config
from components.core.config import KINDS, KNOWN, PROJECT, resolve, result_values
from components.core.files import write_json
from components.core.sources import closure_digests, import_closure, source_digest
from flows.run_context import PipelineRun
from flows.stage_keys import KEY_FILE, READS, KeyParts, changes_since_last, key_parts, reward_digests

THROUGHPUT = (
    "engine.tokens_per_microbatch=77",
    "engine.zero_stage=2",
    "policy.servers=http://other:8000",
    "policy.vllm=/opt/vllm/bin/vllm",
    "policy.vllm_options=[--max-num-seqs, 96]",
    "policy.batch=3",
    "sandbox.build_workers=1",
    "agentic.checkpoint_every=9",
    "home=/elsewhere",
)


def keys(*sets: str) -> dict[str, str]:
    """Return the key of every stage with these parameters and equal inputs."""
    params = resolve("ci", sets).params
    return {name: key_parts(params, name, {}, 0).key for name in READS}


def test_every_parameter_is_marked_and_a_new_one_without_mark_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sections = {
        key
        for key, field in KNOWN.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
    assert KINDS.keys() == KNOWN.keys() - sections and set(KINDS.values()) == {"result", "throughput"}
    monkeypatch.setitem(config.KNOWN, "engine.new", Field(description="unmarked"))
    with pytest.raises(TypeError, match=r"engine\.new is not marked"):
        config._kind("engine.new")


def test_what_changes_only_throughput_changes_no_key() -> None:
    assert keys(*THROUGHPUT) == keys()
    assert PipelineRun(resolve("ci", THROUGHPUT)).key == PipelineRun(resolve("ci")).key


def test_a_parameter_changes_the_keys_of_the_stages_that_read_it() -> None:
    def changed(*sets: str) -> set[str]:
        before, after = keys(), keys(*sets)
        return {name for name in READS if before[name] != after[name]}

    assert changed("agentic.clip_high=0.3") == {"agentic"}
    assert changed("critic.epochs=2") == {"critic"}
    assert changed("evaluation.attempts=7") == {"evaluation"}
    assert changed("gate.pass_rate=0.1") == set()
    assert changed("seed=5") == {"warmup", "rejection", "critic", "agentic", "evaluation"}
    assert changed("policy.layers=1") == {"coldstart"}
    assert changed("engine.dtype=bfloat16") == {
        "fine_tuned",
        "warmup",
        "rejection",
        "critic",
        "agentic",
        "evaluation",
    }
    assert PipelineRun(resolve("ci", ("gate.pass_rate=0.1",))).key != PipelineRun(resolve("ci")).key


def test_comments_docstrings_and_formatting_of_a_source_do_not_count(tmp_path: Path) -> None:
    def digest(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return source_digest(tmp_path / name)

    plain = digest("a.py", "def f(x):\n    return x + 1\n")
    commented = '"""Title."""\n\n\ndef f(\n    x,\n):  # why\n    """Add one."""\n    return (x + 1)\n'
    assert digest("b.py", commented) == plain
    assert digest("c.py", "def f(x):\n    return x + 2\n") != plain
    assert digest("d.md", "one") != digest("e.md", "two")


def test_the_sources_of_a_stage_are_what_its_code_can_reach() -> None:
    warmup = closure_digests(*READS["warmup"].modules)
    assert {
        "components/training/ppo.py",
        "components/sandbox/inside/runner.py",
        "components/sandbox/inside/result_channel.cpp",
        "components/policy/vllm/worker.py",
        "agent_workdir/SKILL.md",
    } <= warmup.keys()
    assert "components/core/params.py" not in warmup, "the values of the parameters are in the key"
    assert not {"components/training/critic.py", "components/training/rejection.py"} & warmup.keys()
    assert not any(path.startswith(("components/registry", "components/cli", "flows")) for path in warmup)
    assert "components/synthesis/core_composer.py" in closure_digests(*READS["coldstart"].modules)
    with pytest.raises(ValueError, match=r"components\.training\.nothing"):
        import_closure("components.training.nothing")


def test_dvc_reads_those_parameters_of_the_sandbox_that_change_results() -> None:
    listed = yaml.safe_load((PROJECT / "dvc.yaml").read_text())["stages"]["tasks"]["params"]
    assert set(result_values(resolve("ci").params, ("sandbox",))) == {
        name for name in listed if name.startswith("sandbox.")
    }


def test_a_stage_that_runs_again_names_what_changed_against_the_newest_stage(tmp_path: Path) -> None:
    def parts(clip_high: float, **upstream: str) -> KeyParts:
        params = resolve("ci", (f"agentic.clip_high={clip_high}",)).params
        return key_parts(params, "agentic", {"policy": "p", "critic": "c"} | upstream, 0)

    assert changes_since_last(parts(0.3), tmp_path) == []
    for age, clip_high in ((2, 0.5), (1, 0.28)):
        made = parts(clip_high)
        write_json(made.folder(tmp_path) / KEY_FILE, made.model_dump(mode="json"))
        os.utime(made.folder(tmp_path) / KEY_FILE, (1_000_000 - age, 1_000_000 - age))
    assert changes_since_last(parts(0.3, critic="d"), tmp_path) == [
        "agentic.clip_high 0.28 -> 0.3",
        "input critic",
    ]
    changed = made.model_copy(update={"sources": made.sources | {"components/training/ppo.py": "other"}})
    assert changed.changes(made) == ["components/training/ppo.py"]


@pytest.mark.parametrize("separator", [".", ":"])
def test_the_module_of_a_reward_of_ones_own_belongs_to_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_reward.py").write_text("def reward(trajectory):\n    return 0.5\n")
    digest = source_digest(tmp_path / "own_reward.py")
    assert reward_digests(f"own_reward{separator}reward") == {"own_reward": digest}
