"""Claims about `cuda-agent optimize`: what it takes, what it leaves, and that its answer is honest."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from agent_fixtures import (
    EVIDENCE,
    MEASURE,
    TASK,
    ScriptedPool,
    ScriptedSampler,
    call,
    params,
    tokenizer,
    verdict_of,
    write,
)
from schedules import SEPARATE, VECTORISED

from components.agent.episode import RolloutRequest, run_episodes
from components.agent.optimize.export import FILES, drop_in, export, headline
from components.agent.optimize.search import NOT_LEARNED, Outcome, find_kernel
from components.agent.policies import folder_policy, is_learned, with_policy_settings
from components.agent.trajectory import Trajectory
from components.bootstrap.canonicalize import canonicalize
from components.bootstrap.kernel_writer import write_kernel
from components.bootstrap.operator_chain import read_chain
from components.cli.main import main
from components.core.config import PROJECT
from components.core.errors import UserError
from components.core.files import check_replaceable
from components.core.progress import Quiet
from components.core.task import KernelTask, load_task
from components.judge.judge import Judge
from components.judge.pool.local_pool import Job, LocalPool
from components.judge.verdict import Admission, Verdict

EXAMPLES = PROJECT / "docs" / "examples"
TOKENIZER = tokenizer()
Lines = Callable[[int, int], str]


class Scripted:
    """A policy that says `lines` in the agent loop over tokens."""

    name = version = digest = "script"

    def __init__(self, lines: Lines):
        self.lines = lines
        self.params = params(context=4096)

    def knows(self, code: str) -> bool:
        return is_learned(self.params, code)

    def sample(self, request: RolloutRequest) -> list[Trajectory]:
        return run_episodes(request, ScriptedSampler(TOKENIZER, self.lines), TOKENIZER)


def search(
    lines: Lines, pool: Any = None, attempts: int = 2, task: KernelTask = TASK, device: str = "cpu"
) -> Outcome:
    policy = Scripted(lines)
    policy.params = policy.params.model_copy(update={"device": device})
    return find_kernel(
        policy,
        task,
        pool or ScriptedPool(),
        attempts=attempts,
        turns=3,
        origin="my.py",
        progress=Quiet(),
    )


# --- the search -----------------------------------------------------------------------------------


def test_the_best_kernel_counts_also_when_a_trajectory_ends_worse() -> None:
    pool = ScriptedPool()
    outcome = search(lambda i, t: f"{write([3.0, 1.2, 0.5][t] + i)}\n{call('Bash', command=MEASURE)}", pool)
    assert outcome.found and outcome.files["kernels/forward.cpp"] == "// 4.0\n"
    epochs = [
        epoch.rpartition("/")[0] for candidate, epoch in pool.judged if dict(candidate.files) == outcome.files
    ]
    assert epochs == ["optimize", "evaluation/choice", "evaluation/reported"]


@pytest.mark.parametrize(
    ("speed", "says"),
    [
        (0.8, "runs at 0.80 times the speed of eager"),
        ("wrong", "no kernel was right"),
        (1.04, "runs at 1.04 times"),
    ],
)
def test_what_is_no_gain_is_called_none(speed: float | str, says: str) -> None:
    outcome = search(lambda i, t: write(speed) if t == 0 else "Done.")
    assert not outcome.found and headline(outcome).startswith("No gain found") and says in headline(outcome)


def test_a_gain_that_torch_compile_gives_as_well_is_said_to_be_so() -> None:
    assert "torch.compile alone is the better choice" in headline(search(lambda i, t: write(1.5)))
    assert (
        headline(search(lambda i, t: write(4.0)))
        == "Found: 4.00 times as fast as eager PyTorch, 2.00 times as fast as torch.compile."
    )


def test_a_judge_that_fails_is_told_to_the_user_and_is_no_missing_gain() -> None:
    some = search(lambda i, t: write("infrastructure" if i else 3.0) if t == 0 else "Done.")
    assert some.found
    assert any("failed on 1 candidates (no_memory: )" in note for note in some.notes)
    with pytest.raises(UserError, match=r"my\.py: the judge failed on every candidate \(no_memory"):
        search(lambda i, t: f"{write('infrastructure')}\n{call('Bash', command=MEASURE)}")


def test_a_module_that_is_too_large_for_the_judge_is_refused_before_any_attempt() -> None:
    class Small(ScriptedPool):
        def check(self, code: str) -> Future[Admission]:
            done: Future[Admission] = Future()
            done.set_result(Admission(False, "too_large", {"detail": "judging it takes 9.0 GB"}))
            return done

    pool = Small()
    with pytest.raises(UserError, match=r"my\.py: the judge cannot measure .* 9\.0 GB.* smaller inputs"):
        search(lambda i, t: write(3.0), pool)
    assert not pool.judged


def test_a_kernel_that_fails_when_measured_anew_is_no_gain() -> None:
    class Fickle(ScriptedPool):
        def submit(self, job: Job) -> Future[Verdict]:
            done: Future[Verdict] = Future()
            fails = job.epoch.startswith("evaluation/reported")
            done.set_result(
                Verdict(status="wrong_output", reason="max_error:wide")
                if fails
                else verdict_of(dict(job.candidate.files))
            )
            return done

    outcome = search(lambda i, t: write(3.0), Fickle())
    assert (
        not outcome.found
        and "failed when it was measured again (wrong_output: max_error:wide)" in headline(outcome)
    )


@pytest.mark.parametrize(
    ("reason", "evidence", "says"),
    [
        (
            "does_not_run",
            {"detail": "No module named 'mine'"},
            "the module does not run by itself (No module named 'mine')",
        ),
        ("zeros_pass", EVIDENCE, "an output of zeros would pass as right"),
        ("not_deterministic", EVIDENCE, "dropout and batch norm belong in evaluation mode"),
    ],
)
def test_a_module_that_cannot_be_judged_is_refused_in_one_sentence(
    reason: str, evidence: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=r"^my\.py: ") as raised:
        search(lambda i, t: "Done.", ScriptedPool(Admission(False, reason, evidence)))
    assert says in str(raised.value)


def test_an_input_that_makes_no_difference_is_noted() -> None:
    outcome = search(
        lambda i, t: write(3.0), ScriptedPool(Admission(False, "input_1_does_not_matter", EVIDENCE))
    )
    assert outcome.found and "input 1 makes no difference" in outcome.notes[0]


# --- what it takes --------------------------------------------------------------------------------


def example(name: str) -> KernelTask:
    return load_task(EXAMPLES / f"{name}.py")


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "one_loop")
)
def test_the_examples_speak_the_language_of_the_small_policy(name: str) -> None:
    chain = read_chain(canonicalize(example(name).code) or "")
    assert chain is not None and write_kernel(chain, VECTORISED["cpu"])


def test_what_a_policy_was_made_for_comes_with_it_and_a_persons_choice_stays() -> None:
    base = params()
    full = with_policy_settings(base, {"prompt": "full", "context": 32_768}, frozenset())
    assert (full.policy.prompt, full.policy.context, full.evaluation.max_new_tokens) == ("full", 32_768, 8192)
    chosen = with_policy_settings(
        base,
        {"prompt": "full", "context": 32_768},
        frozenset({"policy.context", "evaluation.max_new_tokens"}),
    )
    assert (chosen.policy.context, chosen.evaluation.max_new_tokens) == (
        base.policy.context,
        base.evaluation.max_new_tokens,
    )


def test_a_folder_that_holds_no_model_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json is missing"):
        folder_policy(tmp_path, params(), frozenset())


# --- what it leaves -------------------------------------------------------------------------------


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(UserError, match="holds something else than the output"):
        check_replaceable(tmp_path, "the output", FILES)
    check_replaceable(tmp_path / "new", "the output", FILES)


def test_no_gain_leaves_a_report_of_what_was_tried(tmp_path: Path, judge: Judge) -> None:
    outcome = search(lambda i, t: write(["build_failed", 0.5][t]) if t < 2 else "Done.")
    record = export(outcome, params(), tmp_path / "out", judge.builder.cache, "script")
    assert not record["found"] and record["speedup"]["eager"]["estimate"] == 0.5
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.py",
        "report.md",
        "result.json",
        "trajectories",
    ]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "No gain found" in text and "| 1 | 3 | 1 | correct | 0.50 | stop |" in text


def test_the_drop_in_loads_its_library_before_anything_needs_it() -> None:
    source = '"""Words."""\nfrom __future__ import annotations\nimport torch\nimport cuda_extension\n'
    text = drop_in(source)
    compile(text, "model_new.py", "exec")
    assert (
        text.index("from __future__")
        < text.index("spec_from_file_location")
        < text.index("\nimport cuda_extension\n")
    )


@pytest.fixture(scope="module")
def pool(judge: Judge, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    """A pool over the judge that all tests share."""
    made = LocalPool(judge.params, tmp_path_factory.mktemp("pool") / "verdicts")
    made._judge = judge
    yield made
    made.threads.close()


@pytest.fixture(scope="module")
def optimised(judge: Judge, pool: LocalPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `out` of an optimisation under the real judge: a slow kernel first, then a fast one."""
    task = example(
        "energy_score"
    )  # of the examples the one whose gain, 2.3 times, no load of the machine hides
    chain = read_chain(canonicalize(task.code) or "")
    assert chain is not None
    kernels = [write_kernel(chain, schedule["cpu"]) for schedule in (SEPARATE, VECTORISED)]
    said = [call("Write", file_path="kernels/forward.cpp", content=kernel) for kernel in kernels]
    outcome = search(
        lambda i, t: f"{said[t]}\n{call('Bash', command=MEASURE)}" if t < 2 else "Done.",
        pool,
        attempts=1,
        task=task,
    )
    assert (
        outcome.verdict is not None
        and outcome.verdict.status == "correct"
        and outcome.files["kernels/forward.cpp"] == kernels[1]
    )
    assert outcome.found, headline(outcome)
    out = tmp_path_factory.mktemp("optimised") / "out"
    record = export(outcome, params(), out, judge.builder.cache, "script")
    assert record["found"] and json.loads((out / "result.json").read_text()) == record
    return out


def test_a_module_of_ones_own_ends_as_a_drop_in_that_computes_the_same(optimised: Path) -> None:
    probe = (
        "import sys, torch; sys.path.insert(0, 'out'); from model_new import ModelNew\n"
        "sys.path.insert(0, 'out/workspace'); from model import Model, get_inputs\n"
        "old, new = Model(), ModelNew(); new.load_state_dict(old.state_dict()); x = get_inputs()\n"
        "torch.testing.assert_close(new(*x), old(*x)); print('same')"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=optimised.parent, check=False
    )
    assert done.stdout == "same\n", done.stderr


@pytest.fixture
def cuda_agent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cuda-agent", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        return ended.value.code, said.out, said.err

    return run


def test_a_search_takes_as_long_as_suits_the_prompt_unless_a_person_says_otherwise() -> None:
    requests: list[RolloutRequest] = []

    class Silent(Scripted):
        """A policy that keeps each request and samples nothing."""

        def sample(self, request: RolloutRequest) -> list[Trajectory]:
            requests.append(request)
            return []

    policy: Any = Silent(lambda attempt, turn: "")
    for prompt, limits in (("compact", {}), ("full", {"turns": 7, "seconds": 60.0})):
        policy.params = params(prompt=prompt)
        find_kernel(policy, TASK, ScriptedPool(), origin="my.py", progress=Quiet(), **limits)
    compact, full = requests
    assert (len(compact.tasks), compact.max_turns) == (24, policy.params.evaluation.max_turns)
    assert (len(full.tasks), full.max_turns) == (4, 7)
    assert compact.deadline is None and full.deadline is not None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py"], "nowhere.py: the task file cannot be read"),
        ([str(EXAMPLES / "gated_gelu.py"), "--policy", "nowhere"], "--policy nowhere: no such folder"),
        (
            [str(EXAMPLES / "gated_gelu.py"), "--model", "tiny"],
            "--model tiny: only a server has several models",
        ),
        (
            [str(EXAMPLES / "gated_gelu.py"), "--policy", "http://127.0.0.1:9", "--model", ""],
            "start the server or fix the address",
        ),
        ([str(EXAMPLES / "one_loop.py")], "a task needs class Model(nn.Module)"),
    ],
    ids=["no_file", "no_policy", "no_server", "server_is_down", "no_contract"],
)
def test_a_mistake_of_the_command_line_is_one_sentence_and_leaves_nothing(
    tmp_path: Path,
    cuda_agent: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, said = cuda_agent("optimize", *arguments, "--home", str(tmp_path / "home"))
    assert (code, out, said.count("\n")) == (2, "", 1) and says in said
    assert list(tmp_path.iterdir()) == []


def test_a_small_policy_says_when_a_module_is_none_that_it_has_learned() -> None:
    def notes(expression: str) -> tuple[str, ...]:
        task = TASK.model_copy(update={"code": TASK.code.replace("torch.tanh(x)", expression)})
        return search(lambda i, t: "Done.", task=task).notes

    assert notes("torch.tanh(x)") == ()
    assert notes("torch.cumsum(x, 0)") == (NOT_LEARNED,)
