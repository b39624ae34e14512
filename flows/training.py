"""The policy's stages as Prefect tasks: the cold start, and stages 1 to 4, each with a checkpoint as its output."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from prefect import task

from components.core.files import MANIFEST, atomic_folder, digest_json, digest_tree, write_json
from components.policy.checkpoint import Manifest, verify_checkpoint
from components.training.run_stage import run_stage, training_sources
from components.training.stage import Stage, StageName, StageResult
from flows.steps import SAMPLING, Context, Record

CHECKPOINT = "checkpoint"


@task(persist_result=True, result_serializer="json")
def make_checkpoint(folder: Path, call: Callable[[Path], Record]) -> Record:
    """One stage in its folder; every stage runs this under its own name and cache key."""
    return call(folder)


def cold_start(context: Context) -> Record:
    """The policy that training starts from: made from scratch, or the Hugging Face folder that policy.source names."""
    params = context.night.params
    if params.policy.source != "scratch":
        return adopt(context, Path(params.policy.source))

    def call(folder: Path) -> Record:
        from components.bootstrap.cold_start import coldstart  # torch comes with it

        started = time.monotonic()
        context.pool.prepare()  # training leaves it a core
        out = folder / CHECKPOINT
        if (out / MANIFEST).is_file():
            digest = verify_checkpoint(out).digest
        else:
            sources = training_sources(params, params.coldstart.seed)
            digest = coldstart(
                params,
                sources,
                out,
                dataset=context.dataset["version"],
                code=context.night.code,
                progress=context.progress,
            ).digest
        return record(context, folder, digest, seconds=time.monotonic() - started)

    return context.step(make_checkpoint, "coldstart", ("device", "policy", "coldstart", "data"), {}, call)


def adopt(context: Context, source: Path) -> Record:
    """A Hugging Face folder as the first checkpoint: a copy that carries a manifest, so that what follows can name it."""
    files = digest_tree(source, exclude=(MANIFEST,))

    def call(folder: Path) -> Record:
        started = time.monotonic()
        with atomic_folder(folder / CHECKPOINT) as copy:
            for name in files:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, copy / name)
            manifest = Manifest(
                stage="adopted",
                files=files,
                digest=digest_json(files),
                dataset=context.dataset["version"],
                code=context.night.code,
            )
            write_json(copy / MANIFEST, manifest.model_dump())
        return record(
            context, folder, verify_checkpoint(folder / CHECKPOINT).digest, seconds=time.monotonic() - started
        )

    return context.step(
        make_checkpoint, "coldstart", (), {"source": digest_json(files)}, call, name="adopted"
    )


def stage_one(context: Context, policy: Record) -> Record:
    """Single-turn PPO."""
    return train(context, "warmup", ("warmup",), policy)


def stage_two(context: Context, policy: Record) -> Record:
    """Rejection fine-tuning; a policy from scratch is shown some of its demonstrations again."""
    return train(context, "rejection", ("rejection", "coldstart", "data"), policy)


def stage_three(context: Context, policy: Record, sampled: list[Record]) -> Record:
    """Value pretraining on everything that the stages before it sampled."""
    return train(context, "critic", ("critic",), policy, sampled=sampled)


def stage_four(context: Context, policy: Record, values: Record) -> Record:
    """Multi-turn PPO from the actor of stage 2 and the critic of stage 3."""
    return train(context, "agentic", ("agentic",), policy, values=values)


def train(
    context: Context,
    name: StageName,
    sections: tuple[str, ...],
    policy: Record,
    *,
    values: Record | None = None,
    sampled: list[Record] | None = None,
) -> Record:
    """One training stage as a task: a function from the digests of its inputs to the digest of a checkpoint."""
    home, inputs = context.night.home, sampled or []
    upstream = {"policy": policy["digest"]} | ({"critic": values["digest"]} if values else {})
    upstream |= {f"trajectories.{place}": earlier["key"] for place, earlier in enumerate(inputs)}

    def call(folder: Path) -> Record:
        stage = Stage(
            name=name,
            params=context.night.params,
            actor=home / policy["checkpoint"],
            dataset=context.dataset_folder,
            out=folder,
            pool=context.pool,
            progress=context.progress,
            code=context.night.code,
            critic=home / values["checkpoint"] if values else None,
            trajectories=tuple(home / earlier["folder"] / "trajectories" for earlier in inputs),
        )
        if stage.params.engine.ranks:
            from components.training.ray_launcher import run_on_ray

            result = run_on_ray(stage, home / "verdicts")
        else:
            result = run_stage(stage)
        return record(context, folder, result.digest, seconds=result.seconds, result=result)

    return context.step(make_checkpoint, name, (*SAMPLING, *sections), upstream, call)


def record(
    context: Context, folder: Path, digest: str, *, seconds: float, result: StageResult | None = None
) -> Record:
    """What a task hands on: where the checkpoint lies, what it is, and what the stage earned."""
    return {
        "checkpoint": (folder / CHECKPOINT).relative_to(context.night.home).as_posix(),
        "digest": digest,
        "reward_before": result.reward_before if result else None,
        "reward_after": result.reward_after if result else None,
        "seconds": round(seconds, 3),
        "figures": result.figures if result else {},
        "stopped": result.stopped if result else "",
    }
