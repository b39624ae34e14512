"""Conversion of trajectories, the records of a policy's attempts at tasks, to MLflow traces.

An episode becomes an AGENT span, each of its turns an LLM span, and each tool call a TOOL span. The verdicts
of the judge and the reward become feedback on these spans. Every id is computed from the run and the position
of the trajectory in its files, so logging a trajectory again after a kill changes nothing. A trajectory has
no times. So the first span starts at the modification time of the folder with the trajectory's files, and
each further span starts a microsecond later.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlflow.entities import (
    Assessment,
    AssessmentSource,
    Feedback,
    Span,
    SpanType,
    TraceInfo,
    TraceLocation,
    TraceState,
)
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey

from components.agent.trajectory import Trajectory, load_trajectories
from components.core.files import digest_json, hex_to_base64
from components.judge.verdict import Verdict

# Number of steps of a training stage whose best and worst trajectories are logged. The steps are evenly
# spaced over the stage.
SAMPLED_STEPS = 8
# Nanoseconds between the starts of successive spans.
TICK_NS = 1_000
JUDGE = AssessmentSource(source_type="CODE", source_id="judge")


def log_traces(tracing: TracingClient, experiment_id: str, run_id: str, stage: str, folder: Path) -> None:
    """Log some trajectories from the folder of a stage (a step of the pipeline) as MLflow traces of a run.

    Of an evaluation, all trajectories are logged, and of a training stage the best and the worst ones of some
    steps (`chosen`). `run_id` is the id of the MLflow run, `stage` the name of the stage, and `folder` the
    folder with its results.
    """
    for place, batch, trajectory in chosen(folder):
        trace = _Trace(digest_json([run_id, place])[:32], int(batch.stat().st_mtime * 1000), trajectory)
        info = TraceInfo(
            trace_id=trace.trace_id,
            trace_location=TraceLocation.from_experiment_id(experiment_id),
            request_time=trace.begun_ms,
            state=TraceState.OK,
            request_preview=f"task {trajectory.task_id[:12]}",
            response_preview=f"{trajectory.final.status} {trajectory.final.reason}".strip(),
            trace_metadata={
                TraceMetadataKey.SOURCE_RUN: run_id,
                TraceMetadataKey.TRACE_SESSION: trajectory.task_id,
            },
            tags={
                TraceTagKey.TRACE_NAME: f"{stage} {place}",
                "cuda_agent.stage": stage,
                "task_id": trajectory.task_id,
            },
            assessments=trace.feedback,
        )
        tracing.start_trace(info)
        tracing.log_spans(experiment_id, trace.spans)


def chosen(folder: Path) -> Iterator[tuple[str, Path, Trajectory]]:
    """Yield name, folder and content of each trajectory in the stage's folder `folder` that is to be logged.

    Of an evaluation, these are all trajectories. Of a training stage, they are one with the highest and one
    with the lowest reward of each of at most SAMPLED_STEPS steps, which are evenly spaced; trajectories
    without a reward, because the judge failed on them, do not count. The yielded folder is that of the files
    of the trajectory. The name is that folder's name, a slash, and the index of the trajectory among those
    that count, such as "step-0003/5".
    """
    for batch in sorted((folder / "episodes").glob("[!.]*")):
        for index, trajectory in enumerate(load_trajectories(batch)):
            yield f"{batch.name}/{index}", batch, trajectory
    steps = sorted((folder / "trajectories").glob("step-*"))
    spread = {round(part * (len(steps) - 1) / (SAMPLED_STEPS - 1)) for part in range(SAMPLED_STEPS)}
    for step in sorted(spread) if steps else ():
        sampled = [one for one in load_trajectories(steps[step]) if one.reward is not None]
        rewards = [trajectory.earned for trajectory in sampled]
        for index in sorted({rewards.index(max(rewards)), rewards.index(min(rewards))}) if rewards else ():
            yield f"{steps[step].name}/{index}", steps[step], sampled[index]


class _Trace:
    """The spans and the feedback of one trajectory in MLflow, which the constructor computes.

    `identity` has the 32 hexadecimal digits of the trace's id, and `begun_ms` is the start of the first span
    in milliseconds of Unix time. The results are `spans` and `feedback`.
    """

    def __init__(self, identity: str, begun_ms: int, trajectory: Trajectory):
        self.identity = identity
        self.trace_id = f"tr-{identity}"
        self.begun_ms = begun_ms
        self.tick = begun_ms * 1_000_000
        self.spans: list[Span] = []
        self.feedback: list[Assessment] = []
        verdicts = list(trajectory.verdicts)
        root, began = self._id("episode"), self.tick
        heard: Any = trajectory.task
        for number, turn in enumerate(trajectory.turns):
            said = self._span(
                f"turn {number + 1}", SpanType.LLM, root, heard, turn.text, {"shortened": turn.shortened}
            )
            for call in turn.calls:
                done = self._span(
                    call.name or "call",
                    SpanType.TOOL,
                    said,
                    call.arguments,
                    call.observation,
                    {"valid": call.valid},
                )
                for _ in range(call.verdicts):
                    self._judged("measured", verdicts.pop(0), done)
            heard = [call.observation for call in turn.calls]
        self._judged("verdict", trajectory.final, root)
        if trajectory.reward is not None:
            self._say("reward", trajectory.reward, root)
        self._span(
            "episode",
            SpanType.AGENT,
            "",
            trajectory.task,
            trajectory.files,
            {
                "policy_version": trajectory.policy_version,
                "finish_reason": trajectory.finish_reason,
                "error": trajectory.error,
            },
            identity=root,
            began=began,
        )

    def _id(self, name: str) -> str:
        return digest_json([self.identity, name])[:16]

    def _span(
        self,
        name: str,
        kind: str,
        parent: str,
        given: Any,
        out: Any,
        facts: dict[str, Any],
        *,
        identity: str = "",
        began: int = 0,
    ) -> str:
        """Add a span and return its id.

        `kind` is one of MLflow's SpanType, `parent` the id of the parent span or an empty string, `given` and
        `out` the inputs and outputs, and `facts` further attributes. If `identity` is empty, the id is the
        next one in order. The span starts at `began` (nanoseconds of Unix time), or at `tick` if `began` is
        0, and it ends at `tick` + TICK_NS, which becomes the new value of `tick`.
        """
        identity = identity or self._id(f"span {len(self.spans)}")
        began, self.tick = began or self.tick, self.tick + TICK_NS
        named = {
            SpanAttributeKey.REQUEST_ID: self.trace_id,
            SpanAttributeKey.SPAN_TYPE: kind,
            SpanAttributeKey.INPUTS: given,
            SpanAttributeKey.OUTPUTS: out,
        }
        self.spans.append(
            Span.from_dict(
                {
                    "name": name,
                    "trace_id": hex_to_base64(self.identity),
                    "span_id": hex_to_base64(identity),
                    "parent_span_id": hex_to_base64(parent),
                    "start_time_unix_nano": began,
                    "end_time_unix_nano": self.tick,
                    "status": {"code": "STATUS_CODE_OK", "message": ""},
                    "attributes": {key: json.dumps(value) for key, value in (named | facts).items()},
                }
            )
        )
        return identity

    def _judged(self, name: str, verdict: Verdict, span: str) -> None:
        self._say(
            name,
            verdict.status,
            span,
            verdict.log,
            {"reason": verdict.reason, "milestone": str(verdict.milestone)},
        )
        for baseline, ratio in verdict.speedup:
            if ratio is not None:
                self._say(
                    f"{name}.speedup.{baseline}",
                    ratio.estimate,
                    span,
                    "",
                    {"low": f"{ratio.low:.4g}", "high": f"{ratio.high:.4g}"},
                )

    def _say(
        self, name: str, value: str | float, span: str, why: str = "", facts: dict[str, str] | None = None
    ) -> None:
        found = Feedback(
            name=name,
            value=value,
            source=JUDGE,
            rationale=why or None,
            metadata=facts,
            trace_id=self.trace_id,
            span_id=span,
            create_time_ms=self.begun_ms,
            last_update_time_ms=self.begun_ms,
        )
        found.assessment_id = f"a-{digest_json([self.identity, 'feedback', len(self.feedback)])[:32]}"
        self.feedback.append(found)
