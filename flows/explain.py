"""Say for each stage of a run whether it is cached, or why it would run (`cuda-agent run --explain`).

No stage is run, but a champion from which the night would start is copied into the home. The result of a
stage that would run is not known in advance. For a later stage that reads this result, only the parameters,
the sources and the other inputs are compared with those of earlier runs, and the input is listed as made
again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from components.core.config import flatten_values
from components.core.files import MANIFEST, digest_json, digest_tree, read_json
from components.core.param_kinds import result_values
from components.core.params import Params
from components.core.records import FrozenModel
from components.evaluation.suites import load_suite
from components.training.stage import stages_of_run
from flows.data_inputs import absolute_values, maker_digest
from flows.run_context import PipelineRun, prepare_environment
from flows.stage_keys import RECORD, KeyParts, key_parts, read_parts

if TYPE_CHECKING:
    from flows.night import StartPolicy, Unfinished

# Sections of the parameters on which DVC's stage `tasks` depends (dvc.yaml).
DATA = ("data", "device", "precision", "sandbox")


class Explanation(FrozenModel):
    """The statement whether a stage of a run is cached, and otherwise phrases that say why it would run."""

    stage: str
    cached: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Known:
    """The digest and the key of a stage's result, which are both empty if the stage would run."""

    digest: str = ""
    key: str = ""


class Explainer:
    """A builder of the explanations of a run, one for each stage.

    The constructor explains the data set, and each call of `stage` explains one more stage. The caller calls
    it for all stages in their order. `found` has all explanations so far. `params` are the parameters of the
    stages, in which policy.source is never `champion`.
    """

    def __init__(self, run: PipelineRun, params: Params):
        self.run, self.params = run, params
        self.found: list[Explanation] = []
        self.dataset = self._dataset()

    def _dataset(self) -> str:
        """Return the version of the run's data set, or an empty string if it is not built yet."""
        workspace = self.run.home / "dvc"
        made_by = workspace / ".dvc" / "made_by"
        wanted = _plain(flatten_values(absolute_values(self.run.params)))
        wanted = {key: wanted[key] for key in result_values(self.run.params, DATA)}
        newest, reasons = 0.0, ["no data set was built here"]
        for lock in (self.run.home / "datasets").glob("*/dvc.lock"):
            locked = yaml.safe_load(lock.read_text())["stages"]["tasks"]["params"]["params.yaml"]
            built = flatten_values(locked)
            different = [key for key, value in wanted.items() if built.get(key) != value]
            if made_by.is_file() and made_by.read_text() != maker_digest(self.run):
                different.append("the sources or libraries that make it")
            if not different:
                self.found.append(Explanation(stage="dataset", cached=True))
                return lock.parent.name
            if lock.stat().st_mtime > newest:
                newest, reasons = lock.stat().st_mtime, different
        self.found.append(Explanation(stage="dataset", cached=False, reasons=tuple(reasons)))
        return ""

    def stage(self, stage: str, name: str, upstream: dict[str, str], title: str = "") -> Known:
        """Add the explanation of a stage to `found`, and return what is known about the stage's result.

        `stage` is one of run_context.STAGES, and `name` one of stage_keys.READS. `upstream` maps the names of
        the stage's inputs to their digests, which are empty if they are unknown. `title` is the name that is
        shown to people, and its default is `name`.
        """
        inputs = upstream | {"dataset": self.dataset}
        parts = key_parts(self.params, name, inputs, self.run.rerun_number(stage))
        folder = parts.folder(self.run.home)
        record: dict[str, Any] = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
        output = record.get("checkpoint") or record.get("results")
        if output and (self.run.home / output).exists():
            self.found.append(Explanation(stage=title or name, cached=True))
            return Known(record["digest"], parts.key)
        self.found.append(
            Explanation(stage=title or name, cached=False, reasons=tuple(self._reasons(parts, folder)))
        )
        return Known()

    def _reasons(self, parts: KeyParts, folder: Path) -> list[str]:
        if record := next(iter(folder.glob(RECORD)), None):
            return [f"the output that {record} names was deleted"]
        if folder.is_dir():
            return ["begun and not finished; it continues"]
        unknown = [f"input {name} is made again" for name, digest in parts.upstream.items() if not digest]
        others = [
            (other.stat().st_mtime, older)
            for other in (self.run.home / "stages").glob(f"{parts.name}-*")
            if (older := read_parts(other)) is not None
        ]
        if not others:
            is_older = any((self.run.home / "stages").glob(f"{parts.name}-*"))
            return ["a release made it that did not record keys" if is_older else "it never ran here"]
        _, newest = max(others, key=lambda pair: pair[0])
        # Inputs whose digests are unknown are not compared.
        upstream = {name: digest or newest.upstream.get(name, "") for name, digest in parts.upstream.items()}
        return [*parts.model_copy(update={"upstream": upstream}).changes(newest), *unknown]


def _plain(value: Any) -> Any:
    """Return a value as YAML reads it after writing it, for instance with lists in place of tuples."""
    return yaml.safe_load(yaml.safe_dump(value))


def _decided(run: PipelineRun) -> tuple[Params, StartPolicy | None, Unfinished | None]:
    """Return the parameters of the run's stages, the champion it starts from, and the stage it continues.

    Without a champion or an unfinished stage of an earlier night, None takes its place. A night that has not
    begun is treated as if it began now.
    """
    if run.params.policy.source != "champion" and not run.params.night.hours:
        return run.params, None, None
    prepare_environment(run.home)
    from components.registry.tracking import connect
    from flows.night import night_params, peek_night

    night = peek_night(run, connect(run.params.registry, run.home), time.time())
    return night_params(run.params, night.champion), night.champion, night.continues


def _continued(continues: Unfinished) -> list[Explanation]:
    """Return explanations of the finished stages of an earlier night, and of the stage that is continued."""
    done, total = continues.progress or (0, 0)
    place = f"after update {done} of {total}" if total else "from its beginning"
    return [
        *(Explanation(stage=name, cached=True) for name in continues.made),
        Explanation(
            stage=continues.stage, cached=False, reasons=(f"continues run {continues.run_id} {place}",)
        ),
    ]


def explain(run: PipelineRun) -> list[Explanation]:
    """Return an explanation of each stage of the run from the data set to the last evaluation, in order.

    If the run continues an earlier night, the explanations end with the stage that it continues.
    """
    params, champion, continues = _decided(run)
    explainer = Explainer(run, params)
    if continues is not None:
        return [*explainer.found, *_continued(continues)]
    if champion is not None:
        start = explainer.stage("coldstart", "champion", {"champion": champion.digest}, "start from champion")
    elif params.policy.source == "scratch":
        start = explainer.stage("coldstart", "coldstart", {})
    else:
        files = digest_tree(Path(params.policy.source), exclude=(MANIFEST,))
        start = explainer.stage("coldstart", "adopted", {"source": digest_json(files)})
    suite = ""
    if explainer.dataset or params.evaluation.suite != "held-out":
        tasks = load_suite(params, run.home / "datasets" / explainer.dataset)
        suite = digest_json([kernel.task_id for kernel in tasks])
    title = f"evaluation ({'cold start' if champion is None else 'start policy'})"
    explainer.stage("evaluation", "evaluation", {"policy": start.digest, "suite": suite}, title)
    made: dict[str, Known] = {"coldstart": start}
    policy = start
    for name in stages_of_run(params):
        upstream = {"policy": policy.digest}
        if name == "critic":
            upstream |= {
                f"trajectories.{index}": made[earlier].key
                for index, earlier in enumerate(other for other in ("warmup", "rejection") if other in made)
            }
        elif name == "agentic" and "critic" in made:
            upstream |= {"critic": made["critic"].digest}
        made[name] = explainer.stage(name, name, upstream)
        policy = policy if name == "critic" else made[name]
    explainer.stage("evaluation", "evaluation", {"policy": policy.digest, "suite": suite})
    return explainer.found
