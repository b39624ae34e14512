"""A task with four shapes, from the text that the policy reads to the report of an evaluation, on cpu."""

import itertools
import json
from pathlib import Path

from agent_fixtures import MEASURE, ScriptedSampler, call, params, tokenizer
from schedules import VECTORISED
from shapes_fixtures import CALLS, FILES, KERNEL, TASK
from shapes_fixtures import pool as pool

from components.agent.episode import RolloutRequest, run_episodes
from components.agent.trajectory import Trajectory
from components.agent.workspace import Workspace
from components.bootstrap.kernel_writer import write_kernel
from components.bootstrap.operator_chain import read_chain
from components.core.config import resolve
from components.core.progress import Quiet
from components.core.workloads import workloads_of
from components.evaluation.evaluate import evaluate
from components.evaluation.report import write_evaluation_report
from components.judge.judge import Judge
from components.judge.pool.local_pool import LocalPool
from components.judge.verdict import milestone
from components.synthesis.core_composer import MOST_SHAPES, compose_tasks
from flows.stages import table


def test_composed_tasks_of_several_shapes_are_admitted_and_the_kernel_writer_can_solve_them(
    judge: Judge,
) -> None:
    settings = ["data.workload_share=1", "data.half_share=0.3", "data.numel=[16384, 65536]"]
    data = resolve("ci", [*settings, "data.eager_seconds=[1e-6, 1]"]).params.data
    for composed in itertools.islice(compose_tasks(5, data), 4):
        workloads, chain = workloads_of(composed.code, "composed"), read_chain(composed.code)
        assert 2 <= len(workloads) <= MOST_SHAPES and chain is not None
        admission = judge.admit(composed.code, data.eager_seconds)
        assert admission.admitted, admission
        task = composed.model_copy(update={"evidence": admission.evidence})
        files = Workspace(task).files | {KERNEL: write_kernel(chain, VECTORISED["cpu"])}
        verdict = judge.verdict(task, files, compare_compile=None)
        assert verdict.status == "correct", (verdict.log, composed.code)
        assert [one.call for one in verdict.workloads] == [one.call for one in workloads]


class Writer:
    """A policy that reads SKILL.md, writes the kernel of the example and measures it."""

    name = version = digest = "writer"

    def __init__(self) -> None:
        found = params(context=16384)
        evaluation = found.evaluation.model_copy(update={"attempts": 1, "max_new_tokens": 4096})
        self.params = found.model_copy(update={"evaluation": evaluation})
        self.tokenizer = tokenizer(16384)
        self.trajectories: list[Trajectory] = []

    def sample(self, request: RolloutRequest) -> list[Trajectory]:
        write = [call("Write", file_path=name, content=text) for name, text in FILES.items()]
        turns = [
            call("Bash", command="tail -n 5 SKILL.md"),
            "\n".join([*write, call("Bash", command=MEASURE)]),
            "Done.",
        ]
        sampler = ScriptedSampler(self.tokenizer, lambda index, turn: turns[turn])
        found = run_episodes(request, sampler, self.tokenizer)
        self.trajectories += found
        return found


def test_a_task_with_four_shapes_goes_from_the_skill_to_the_report(pool: LocalPool, tmp_path: Path) -> None:
    policy, out = Writer(), tmp_path / "evaluation"
    found = evaluate(policy, [TASK], pool, out, epoch="night", progress=Quiet(), seed=0)
    (trajectory,) = policy.trajectories
    read, *_, measured = [made for turn in trajectory.turns for made in turn.calls]
    told = [line.partition(": ") for line in read.observation.splitlines()[-4:]]
    assert [call for call, _, _ in told] == [f"- `{one}`" for one in CALLS]
    assert all(shapes.startswith("float32 [") for _, _, shapes in told)
    assert [line.partition(": ")[0] for line in measured.observation.splitlines()[-4:]] == CALLS
    assert trajectory.reward == trajectory.final.milestone >= 1
    slow = trajectory.final.workloads[0].model_copy(
        update={"speedup": trajectory.final.speedup.model_copy(update={"eager": None})}
    )
    assert milestone(trajectory.final.model_copy(update={"workloads": (slow,)})) == 1

    (row,) = found.tasks
    assert row.status == "correct" and [one.call for one in row.workloads] == CALLS
    assert all(one.speedup.compile is not None for one in row.workloads)
    text = write_evaluation_report(out, found).read_text()
    report = json.loads((out / "report.json").read_text())
    assert [one["call"] for one in report["tasks"][0]["workloads"]] == CALLS
    for one in row.workloads:
        assert one.speedup.eager is not None
        assert f"<code>{one.call}</code>" in text and f"{one.speedup.eager.estimate:.2f}×<small>" in text
    assert all(one in table(found.tasks)[0]["workloads"] for one in CALLS)
