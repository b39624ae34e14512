"""A stage as ranks that Ray Train places on a cluster: the same entry point as everywhere, DeepSpeed over several nodes.

Ray Train chooses the nodes, sets what torchrun would set and makes the process group; when a rank dies it ends the
others. The stage's folder has to be the same place on every node, since what it holds is how a stage continues.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from components.core.errors import StageFailed
from components.core.progress import Quiet
from components.judge.pool import open_pool
from components.judge.ray_pool import connect
from components.training.run_stage import run_stage
from components.training.stage import Stage, StageResult, load_result

FOLLOW_SECONDS = 5.0
LIVING = ("pool", "progress")
"""Fields of a stage that stay in their process."""


def run_on_ray(stage: Stage, verdicts: Path) -> StageResult:
    """Run the stage as `engine.ranks` ranks on the cluster that RAY_ADDRESS names; each rank journals to `verdicts`."""
    connect()
    engine, cuda = stage.params.engine, stage.params.device == "cuda"
    resources = (
        {"CPU": 1.0} | ({"GPU": 1.0} if cuda else {}) | ({engine.resource: 1.0} if engine.resource else {})
    )
    trainer = TorchTrainer(
        _rank,
        train_loop_config={
            "stage": {name: value for name, value in vars(stage).items() if name not in LIVING},
            "verdicts": verdicts,
        },
        torch_config=TorchConfig(
            backend="nccl" if cuda else "gloo", timeout_s=int(engine.collective_seconds)
        ),
        scaling_config=ScalingConfig(num_workers=engine.ranks, use_gpu=cuda, resources_per_worker=resources),
        # What a lost rank leaves is continued by the next run of the stage, not by Ray: there is one way to resume.
        run_config=RunConfig(
            name=stage.name, storage_path=str(stage.out / "ray"), failure_config=FailureConfig(max_failures=0)
        ),
    )
    try:
        with _followed(stage):
            trainer.fit()
    except TrainingFailedError as error:
        raise StageFailed(
            f"{stage.name}: a rank on Ray failed, and the same command continues from the last good state: {str(error)[-500:]}"
        ) from error
    result = load_result(stage.out)
    assert result is not None, "every rank ended, so the result is written"
    return result


@contextmanager
def _followed(stage: Stage) -> Iterator[None]:
    """Tell the stage's progress, which stays here, what rank 0 writes into its curves."""
    params, told, done = stage.params, 0, threading.Event()
    # How many steps stage 2 takes is known once it has sampled.
    total = {
        "warmup": params.warmup.steps,
        "critic": params.critic.epochs,
        "agentic": params.agentic.steps,
    }.get(stage.name, 0)

    def tell() -> None:
        nonlocal told
        curves = stage.out / "metrics.jsonl"
        steps = len(curves.read_text().splitlines()) if curves.is_file() else 0
        if steps != told:
            told = steps
            stage.progress.update(stage.name, steps, max(steps, total))

    def follow() -> None:
        while not done.wait(FOLLOW_SECONDS):
            tell()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    tell()


def _rank(config: dict[str, Any]) -> None:
    params = config["stage"]["params"]
    pool = open_pool(params, config["verdicts"])
    try:
        run_stage(Stage(**config["stage"], pool=pool, progress=Quiet()))
    finally:
        pool.close()
