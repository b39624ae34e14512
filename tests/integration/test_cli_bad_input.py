"""Claims about mistakes of users: each is one sentence on standard error, before any work."""

import json
import subprocess
from pathlib import Path

import pytest
from cli_fixtures import CLI, command, one_sentence

from components.core import config
from components.core.config import resolve
from components.core.errors import UserError
from components.judge.pool.open_pool import judge_workdir


def test_an_unknown_parameter_names_the_nearest_known_one(tmp_path: Path) -> None:
    assert "the nearest known one is warmup.steps" in one_sentence(
        command("run", "--home", str(tmp_path), "--set", "warmup.step=3")
    )


def test_a_stage_that_would_never_train_the_policy_is_refused(tmp_path: Path) -> None:
    options = ("--set", "warmup.steps=2", "--set", "warmup.critic_warmup_steps=2")
    assert "warmup.critic_warmup_steps leaves fewer than warmup.min_updates of the 2 steps" in one_sentence(
        command("run", "--home", str(tmp_path), *options)
    )


def test_a_value_out_of_range_says_what_the_parameter_is(tmp_path: Path) -> None:
    sentence = one_sentence(command("run", "--home", str(tmp_path), "--set", "gate.pass_rate=2"))
    assert "gate.pass_rate = 2" in sentence and "least lower end" in sentence


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 2024-13-45", "not valid YAML (month must be in 1..12)"),
        (f"seed: {'[' * 3000}", "not valid YAML"),
        ("seed: !!bool x", "not valid YAML"),
        ("data: &a\n  seed: *a", "not valid YAML (Circular reference detected)"),
        ("- a", "a mapping of parameters is expected"),
        ("profiles: [smoke]", "profiles must be a mapping"),
        ("profiles: {smoke: 5}", "profiles must be a mapping"),
        ("profiles: {1: {}}", "unknown profile smoke; give one of 1"),
    ],
)
def test_a_parameter_file_of_something_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(UserError, match=r"own\.yaml: ") as error:
        resolve("smoke", (), tmp_path / "own.yaml")
    assert said in str(error.value)


def test_a_level_that_is_no_number_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"gate\.faster_rate_compile_by_level = \{'²': 0\.5\} is not accepted"
    ):
        resolve("smoke", ("gate.faster_rate_compile_by_level.²=0.5",))


@pytest.mark.parametrize(
    ("set_", "said"),
    [
        ("seed=2024-13-45", "not valid YAML"),
        (f"seed={'9' * 5000}", "not valid YAML"),
        (f"seed={'[' * 3000}", "not valid YAML"),
        ("data=&a {b: *a}", "not valid YAML"),
        ("gate.approval_seconds=.inf", "gate.approval_seconds = inf"),
        ("gate.approval_seconds=1000000000000", "gate.approval_seconds = 1000000000000"),
        ("seed=4294967296", "less than or equal to 4294967295"),
        ("coldstart.seed=100000000000000000000000", "less than or equal to 4294967295"),
        ("registry.model=o'brien", 'registry.model = "o\'brien" is not accepted'),
        ("registry.model=a/b", "registry.model = 'a/b' is not accepted"),
    ],
)
def test_a_value_that_nothing_can_use_is_refused(set_: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^--set {set_.partition('=')[0]}=") as error:
        resolve("smoke", (set_,))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        "store gc --older-than 1e300",
        "token create a --days 1e300",
        "optimize model.py --attempts 99999999999999999999999",
        "params --write /proc/x",
    ],
)
def test_an_option_out_of_range_is_bad_input(tmp_path: Path, arguments: str) -> None:
    done = command(*arguments.split(), cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr and not any(tmp_path.iterdir())


def test_what_a_path_holds_instead_of_a_policy_or_a_candidate_is_named(tmp_path: Path) -> None:
    (tmp_path / "file.sh").write_text("x")
    for name, said in {"file.sh": "is neither a folder nor a GGUF file", "x": "does not exist"}.items():
        with pytest.raises(UserError, match=f"policy.source: .*{name} {said}"):
            config.check_policy_source(resolve("smoke", (f"policy.source={tmp_path / name}",)).params)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"--against .*empty: has no model_new\.py"):
        judge_workdir(
            resolve("smoke").params, tmp_path / "file.sh", None, tmp_path, against=tmp_path / "empty"
        )


def test_an_unknown_profile_names_those_there_are(tmp_path: Path) -> None:
    assert "unknown profile smoek; give one of h20-pool, smoke," in one_sentence(
        command("run", "--home", str(tmp_path), "--profile", "smoek")
    )
    (tmp_path / "own.yaml").write_text("profiles:\n")
    assert "unknown profile smoke; give one of none: it has no profiles" in one_sentence(
        command("run", "--home", str(tmp_path), "--params", str(tmp_path / "own.yaml"))
    )


@pytest.mark.parametrize(
    ("set_", "said"),
    [
        ("store.url=ftp://somewhere", "ftp://somewhere is neither a folder nor s3://bucket/prefix"),
        ("store.url=s3://", "names no bucket"),
        ("evaluation.suite=nowhere", "evaluation.suite: nowhere is neither"),
        ("evaluation.suite=shipped evaluation.levels=[9]", "shipped has no task of level 9"),
        (
            "evaluation.suite=nowhere/KernelBench",
            "git clone https://github.com/ScalingIntelligence/KernelBench nowhere/KernelBench",
        ),
        ("data.against=[nowhere]", "data.against: nowhere is neither"),
    ],
)
def test_what_only_the_last_steps_of_a_run_use_is_looked_at_first(
    tmp_path: Path, set_: str, said: str
) -> None:
    sets = [word for change in set_.split() for word in ("--set", change)]
    assert said in one_sentence(command("run", "--home", str(tmp_path / "home"), *sets))
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("profile", ["hf", "hf-adapter", "h20-pool"])
def test_a_profile_without_its_model_says_so_before_any_work(profile: str, tmp_path: Path) -> None:
    said = (
        "policy.source: models/policy does not exist; link the folder of a Hugging Face model there, "
        "or give one, or a GGUF file, with --set policy.source=PATH."
    )
    home, output = tmp_path / "home", tmp_path / "stage"
    arguments = ("--profile", profile, "--home", str(home))
    assert one_sentence(command("run", *arguments, cwd=tmp_path)) == f"cuda-agent: {said}"
    assert not home.exists()
    if profile != "hf":
        return  # the other commands are the same for all profiles
    stage = ("warmup", "--input", "START", "--dataset", "DATA", "--output", str(output))
    for ranks in ("1", "2"):
        started = command("train", *stage, "--ranks", ranks, *arguments, cwd=tmp_path)
        assert one_sentence(started) == f"cuda-agent: {said}"
    assert not home.exists() and not output.exists()

    doctor = command("doctor", "--json", *arguments, cwd=tmp_path)
    findings = {finding["name"]: finding for finding in json.loads(doctor.stdout)["findings"]}
    assert doctor.returncode == 2
    assert findings["policy"] | {"here": False, "needed": True, "cost": said} == findings["policy"]
    # What trains nothing needs no model.
    listed = command("params", "--json", *arguments, cwd=tmp_path)
    assert json.loads(listed.stdout)["params"]["policy.source"]["value"] == "models/policy"


def test_a_reward_that_cannot_be_imported_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    home = tmp_path / "home"
    said = one_sentence(command("run", "--home", str(home), "--set", "reward=no_such_module.reward"))
    assert "params.yaml: reward: no_such_module.reward cannot be imported" in said and not home.exists()


def test_an_unknown_stage_lists_the_stages(tmp_path: Path) -> None:
    assert "coldstart" in one_sentence(command("run", "--home", str(tmp_path), "--from", "stage1"))


def test_a_redo_of_nothing_is_refused(tmp_path: Path) -> None:
    assert "nothing was run" in one_sentence(
        command("run", "--home", str(tmp_path / "new"), "--from", "critic")
    )


def test_a_redo_of_a_stage_that_the_run_does_not_have_is_refused(tmp_path: Path) -> None:
    sets = ("--set", "agentic.advantages=group")
    assert "this run trains no critic; give agentic" in one_sentence(
        command("run", "--home", str(tmp_path / "new"), "--from", "critic", *sets)
    )


def test_an_unwritable_home_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in one_sentence(command("run", "--home", str(tmp_path / "file" / "home")))


def test_a_missing_compiler_and_missing_bubblewrap_are_named(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    assert "g++ is not installed" in one_sentence(
        command("run", "--home", str(tmp_path / "home"), path=str(programs))
    )
    (programs / "g++").write_text("#!/bin/sh\n")
    (programs / "g++").chmod(0o755)
    done = command("run", "--home", str(tmp_path / "home"), path=str(programs))
    assert (
        done.returncode == 3
        and "bubblewrap is not installed" in done.stderr
        and len(done.stderr.splitlines()) == 1
    )
    (programs / "bwrap").write_text("#!/bin/sh\necho no namespaces here >&2; exit 1\n")
    (programs / "bwrap").chmod(0o755)
    done = command("run", "--home", str(tmp_path / "home"), path=str(programs))
    assert (
        done.returncode == 3
        and "no sandbox can be made here" in done.stderr
        and "(the system says: no namespaces here)" in done.stderr
    )


def test_a_current_folder_that_was_removed_is_one_sentence(tmp_path: Path) -> None:
    script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", script, "sh", str(gone), *CLI, "doctor"], capture_output=True, text=True, check=False
    )
    assert "the current folder was removed" in one_sentence(done)
