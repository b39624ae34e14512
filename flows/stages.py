"""The cold start, the training stages and the evaluations as Prefect tasks, cached by their inputs.

The cold start makes the first policy of a run.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

from components.agent.policies import checkpoint_policy
from components.core.files import MANIFEST, digest_file, digest_json, digest_tree
from components.evaluation.evaluate import evaluate
from components.evaluation.results import RESULTS, Evaluation, Summary, TaskResult, load_evaluation
from components.evaluation.suites import load_suite
from components.judge.verdict import workload_line
from components.policy import first_policy
from components.policy.checkpoint import verify_checkpoint
from components.training.run_stage import run_stage
from components.training.stage import RESULT, UNFINISHED, Stage, StageName, StageResult
from flows.night import StartPolicy, keep_checkpoint
from flows.progress import RenamedProgress
from flows.steps import CheckpointRecord, Context, EvaluationRecord

CHECKPOINT = "checkpoint"


def start_policy(context: Context, champion: StartPolicy | None) -> CheckpointRecord:
    """Return the record of the checkpoint that the run starts from.

    It is that of `champion`, the promoted version, or, if `champion` is None, that of the first policy, which
    `cold_start` makes. Raises UserError if the champion's checkpoint is damaged.
    """
    if champion is None:
        return cold_start(context)

    def work(folder: Path) -> CheckpointRecord:
        started = time.monotonic()
        checkpoint = keep_checkpoint(context.promotion, champion.version)
        return checkpoint_record(context, checkpoint, champion.digest, time.monotonic() - started)

    return context.stage(
        "coldstart",
        {"champion": champion.digest},
        work,
        CheckpointRecord,
        name="champion",
        title="start from champion",
    )


def cold_start(context: Context) -> CheckpointRecord:
    """Return the record of the checkpoint of the first policy, which cached Prefect tasks make.

    If policy.source is `scratch`, a small policy is trained from scratch on demonstrations, which are answers
    that rules have written (components/bootstrap/demonstrations.py). Otherwise the policy is made from the
    folder or file that policy.source names, and fine-tuned on demonstrations if coldstart.language_model is
    set. Raises UserError if that folder or file cannot be read, and StageFailed if training fails.
    """
    params = context.params
    if params.policy.source != "scratch":
        adopted = adopt(context, Path(params.policy.source))
        if not params.coldstart.language_model:
            return adopted
        tuned = train(context, "coldstart", adopted, form="fine_tuned")
        assert tuned is not None
        return tuned

    def work(folder: Path) -> CheckpointRecord:
        # These import torch.
        from components.bootstrap.cold_start import coldstart
        from components.synthesis.core_composer import compose_training_tasks

        started = time.monotonic()
        context.pool.prepare()  # training leaves one processor core free for the judge
        out = folder / CHECKPOINT
        if (out / MANIFEST).is_file():
            manifest = verify_checkpoint(out)
        else:
            manifest = coldstart(
                params,
                compose_training_tasks(params.coldstart.seed, params.data, params.device),
                out,
                dataset=context.dataset.version,
                code=context.run.code,
                progress=context.progress,
            )
        return checkpoint_record(context, out, manifest.digest, time.monotonic() - started)

    return context.stage("coldstart", {}, work, CheckpointRecord)


def adopt(context: Context, source: Path) -> CheckpointRecord:
    """Return the record of a checkpoint made of the Hugging Face folder or GGUF file `source`.

    A Prefect task makes the checkpoint, and its result is cached. Raises UserError if transformers cannot
    read the source.
    """

    def work(folder: Path) -> CheckpointRecord:
        started = time.monotonic()
        manifest = first_policy.adopt(
            source, folder / CHECKPOINT, dataset=context.dataset.version, code=context.run.code
        )
        return checkpoint_record(context, folder / CHECKPOINT, manifest.digest, time.monotonic() - started)

    return context.stage(
        "coldstart", {"source": first_policy.source_digest(source)}, work, CheckpointRecord, name="adopted"
    )


def train(
    context: Context,
    name: StageName,
    policy: CheckpointRecord,
    *,
    critic: CheckpointRecord | None = None,
    sampled: list[CheckpointRecord] | None = None,
    earlier: list[CheckpointRecord] | None = None,
    deadline: float | None = None,
    may_begin: bool = True,
    form: str = "",
) -> CheckpointRecord | None:
    """Run one training stage as a cached Prefect task, and return the record of its checkpoint.

    `name` is the stage's name. `policy` is the record of the checkpoint that the stage starts with, and
    `critic` that of the critic if the stage needs one. `sampled` are the records of the stages whose
    trajectories the stage reads, and `earlier` those of the stages of this run before it, whose states for
    resuming are deleted when this stage has one. `deadline` is the time (seconds of Unix time) after which
    the stage ends with its current update. If `may_begin` is false, a stage that no earlier attempt has begun
    is not run, and None is returned. `form` is a key of READS (stage_keys.py) if it is not the stage's name,
    such as "fine_tuned" for the cold start of a language model. Raises UserError for inputs with which the
    stage cannot run, and StageFailed if training fails.
    """
    home, inputs, form = context.run.home, sampled or [], form or name
    upstream = {"policy": policy.digest} | ({"critic": critic.digest} if critic else {})
    upstream |= {f"trajectories.{index}": earlier.key for index, earlier in enumerate(inputs)}
    demonstrations = context.params.coldstart.demonstrations
    if isinstance(demonstrations, str) and name in ("coldstart", "rejection"):
        upstream["demonstrations"] = digest_json(digest_tree(Path(demonstrations)))
    folder = context.parts(name, form, upstream).folder(home)
    if not may_begin and not any((folder / file).exists() for file in ("state", RESULT, UNFINISHED)):
        return None

    def work(folder: Path) -> CheckpointRecord:
        stage = Stage(
            name=name,
            params=context.params,
            actor=policy.output(home),
            dataset=context.dataset_folder,
            out=folder,
            pool=context.pool,
            progress=context.progress,
            code=context.run.code,
            critic=critic.output(home) if critic else None,
            trajectories=tuple(home / earlier.folder / "trajectories" for earlier in inputs),
            earlier=tuple(home / finished.folder for finished in earlier or []),
            deadline=deadline,
        )
        if stage.params.pool.trainers:
            from components.training.ray_launcher import run_on_ray

            if stage.params.pool.judges:
                # They are started by this process, because they end with the process that started them.
                context.pool.prepare().result()
            result = run_on_ray(stage, home / "verdicts")
        else:
            result = run_stage(stage)
        return checkpoint_record(context, folder / result.checkpoint, result.digest, result.seconds, result)

    return context.stage(name, upstream, work, CheckpointRecord, name=form, title=name)


def checkpoint_record(
    context: Context, checkpoint: Path, digest: str, seconds: float, result: StageResult | None = None
) -> CheckpointRecord:
    """Return the record of the checkpoint in the folder `checkpoint`.

    `digest` is that of the checkpoint, and `seconds` is how long its stage took. `result` has the rewards and
    figures of a training stage, and is None for a first policy.
    """
    return CheckpointRecord(
        checkpoint=checkpoint.relative_to(context.run.home).as_posix(),
        digest=digest,
        reward_before=result.reward_before if result else None,
        reward_after=result.reward_after if result else None,
        seconds=round(seconds, 3),
        figures=result.figures if result else {},
        stopped=result.stopped if result else "",
        progress=result.progress if result else None,
    )


def evaluate_checkpoint(context: Context, title: str, checkpoint: str, digest: str) -> EvaluationRecord:
    """Evaluate a checkpoint on the run's evaluation suite, or return the cached record of its evaluation.

    `checkpoint` is a path relative to the home, the folder of all runs, and `digest` is that of the
    checkpoint's files. `title` is shown to people in order to distinguish the evaluations of one run. It is
    not part of the cache key, because the same policy under another title gives the same evaluation. Raises
    UserError if the checkpoint is damaged or the suite cannot be evaluated, and StageFailed if the judge
    fails on too many tasks.
    """
    run, params = context.run, context.params
    suite = load_suite(params, context.dataset_folder)

    def work(folder: Path) -> EvaluationRecord:
        started = time.monotonic()
        with contextlib.closing(checkpoint_policy(run.home / checkpoint, params)) as policy:
            evaluation = evaluate(
                policy,
                suite,
                context.pool,
                folder,
                # The judge reuses stored verdicts of the same epoch only. So a new evaluation measures every
                # task, and a resumed evaluation, which has the same folder, continues.
                epoch=folder.name,
                progress=RenamedProgress(context.progress, title),
                seed=params.seed,
            )
        results = folder / RESULTS
        return EvaluationRecord(
            results=results.relative_to(run.home).as_posix(),
            digest=digest_file(results),
            figures=figures(evaluation.overall),
            seconds=round(time.monotonic() - started, 3),
        )

    return context.stage(
        "evaluation",
        {"policy": digest, "suite": digest_json([kernel.task_id for kernel in suite])},
        work,
        EvaluationRecord,
        title=title,
    )


def load(context: Context, record: EvaluationRecord) -> Evaluation:
    return load_evaluation(record.output(context.run.home))


def figures(summary: Summary) -> dict[str, Any]:
    """Return those figures of an evaluation that `cuda-agent run --json` prints, such as "pass_rate"."""
    return summary.model_dump(
        include={
            *("pass_rate", "faster_rate", "geomean", "mean_reward", "limit_score", "attempts_mean_reward"),
            *("tasks", "errors"),
        }
    )


def table(results: tuple[TaskResult, ...]) -> list[dict[str, Any]]:
    """Return one row for each task's result, which maps columns, such as "status", to values.

    MLflow shows the rows of several runs side by side. "speedup_eager" and "speedup_compile" are the
    speed-ups over eager mode and torch.compile, None if they were not measured.
    """
    return [
        {
            "task_id": row.task_id,
            "ops": " ".join(row.ops),
            "status": row.status,
            "milestone": row.milestone,
            "speedup_eager": row.ratio("eager"),
            "speedup_compile": row.ratio("compile"),
            "compile_mode": row.evidence.get("compile_mode", ""),
            "workloads": "; ".join(map(workload_line, row.workloads)),
            "reason": row.reason,
            "degenerate": row.degenerate,
            "level": row.level,
        }
        for row in results
    ]
