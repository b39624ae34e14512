"""Launcher that runs a stage as several ranks on the nodes of a Ray cluster, with Ray Train.

Ray Train chooses the nodes, sets the same environment variables as torchrun and makes the process group. If a
rank fails, Ray Train ends the other ranks. All nodes must see the stage's folder under the same path, because
every rank reads and writes there.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, get_context
from ray.train.torch import TorchConfig, TorchTrainer

from components.core.errors import StageFailed
from components.core.progress import Quiet
from components.judge.pool.local_pool import with_any_duration
from components.judge.pool.open_pool import open_pool
from components.planning.ray_cluster import RUN, bundle, connect
from components.training.launcher import ERROR_FILE, raise_first_error
from components.training.metrics import METRICS
from components.training.run_stage import run_stage
from components.training.stage import UNFINISHED, Stage, StageResult, load_result

# Seconds between two reads of the metrics file that rank 0 writes.
FOLLOW_SECONDS = 5.0
# Fields of a stage that are not sent to the ranks, because each rank makes its own.
LOCAL_FIELDS = ("pool", "progress")


def run_on_ray(stage: Stage, verdicts: Path) -> StageResult:
    """Run the stage as `pool.trainers` ranks on the cluster that RAY_ADDRESS names, and return its result.

    Ray Train reserves the GPUs of the ranks in a placement group of their own, apart from that of the judges,
    which measure kernels. `verdicts` is the folder in which the judge pool of each rank stores its verdicts,
    the results of these measurements. Raises UserError if the earliest error that a rank recorded is a
    UserError, and StageFailed for any other failure of a rank.
    """
    connect()
    logs = stage.out / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    trainers, cuda = stage.params.pool.trainers, stage.params.device == "cuda"
    trainer = TorchTrainer(
        _rank,
        train_loop_config={
            "stage": {name: value for name, value in vars(stage).items() if name not in LOCAL_FIELDS},
            "verdicts": verdicts,
            "logs": logs.resolve(),
            "run": os.environ[RUN],
        },
        torch_config=TorchConfig(
            backend="nccl" if cuda else "gloo", timeout_s=int(stage.params.engine.collective_seconds)
        ),
        scaling_config=ScalingConfig(
            num_workers=trainers, use_gpu=cuda, resources_per_worker=bundle(stage.params)
        ),
        # Ray must not restart a failed stage (max_failures=0), because the user's next run continues the
        # stage, in the same way as without Ray.
        run_config=RunConfig(
            name=stage.name, storage_path=str(stage.out / "ray"), failure_config=FailureConfig(max_failures=0)
        ),
    )
    try:
        with _reported_progress(stage):
            trainer.fit()
    except TrainingFailedError as error:
        raise_first_error(logs, trainers)
        raise StageFailed(
            f"{stage.name}: a rank on Ray failed: {str(error)[-500:]}; the same command continues."
        ) from error
    result = load_result(stage.out) or load_result(stage.out, UNFINISHED)
    assert result is not None, "every rank ended, so the result is written"
    return result


@contextmanager
def _reported_progress(stage: Stage) -> Iterator[None]:
    """Return a context in which a thread reports finished steps to the stage's progress display.

    The thread counts the steps in the metrics file, because the progress display is not sent to the ranks.
    """
    params, done = stage.params, threading.Event()
    # 0 for stage 2, whose number of steps is known only after it has sampled.
    total = {
        "warmup": params.warmup.steps,
        "critic": params.critic.epochs,
        "agentic": params.agentic.steps,
    }.get(stage.name, 0)

    path = stage.out / METRICS

    def follow() -> None:
        reported, ended = 0, False
        while not ended:
            ended = done.wait(FOLLOW_SECONDS)
            steps = len(path.read_text().splitlines()) if path.is_file() else 0
            if steps != reported:
                reported = steps
                stage.progress.update(stage.name, steps, max(steps, total))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _rank(config: dict[str, Any]) -> None:
    """Run one rank of the stage; Ray Train calls this with `train_loop_config`.

    `config` has the fields of the Stage that are sent to the ranks (`stage`), the folder in which the judge
    stores its verdicts on kernels (`verdicts`), the folder of the ranks' errors (`logs`) and the id of the
    run on the cluster (`run`).
    """
    file = config["logs"] / str(get_context().get_world_rank()) / "error.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    os.environ[ERROR_FILE] = str(file)
    os.environ[RUN] = config["run"]
    with closing(
        open_pool(with_any_duration(config["stage"]["params"]), config["verdicts"], trains=True)
    ) as pool:
        run_stage(Stage(**config["stage"], pool=pool, progress=Quiet()))
