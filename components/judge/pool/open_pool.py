"""Choice of where candidates are judged: on this machine, on a Ray cluster, or by the judge's HTTP service.

This module imports no torch, so that a command that uses a running service starts fast.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.errors import InfrastructureError, UserError
from components.core.files import digest_json, read_json, write_json
from components.core.params import Params
from components.core.progress import Report, ignore
from components.core.task import load_task
from components.judge.candidate import read_candidate
from components.judge.pool.local_pool import Job, LocalPool, infrastructure_verdict
from components.judge.pool.service_client import ServiceClient, connect
from components.judge.verdict import Verdict
from components.sandbox.build import open_factory
from components.sandbox.preflight import check_isolation

if TYPE_CHECKING:
    from components.judge.judge import Judge


def open_pool(
    params: Params, verdicts: Path, *, use_service: bool = False, trains: bool = False
) -> LocalPool:
    """Return a pool whose judges are where the parameters of the section pool say.

    A pool accepts candidates (implementations of a task's module) and returns verdicts. `verdicts` is the
    folder in which it keeps a file for each verdict (the journal). With `use_service`, a pool on this machine
    starts no judge if a service of this account (`cuda-agent serve`) runs on the pool's folder, and uses this
    service. `trains` says that this process also trains, perhaps on the GPU of the judge. If the judge is on
    this machine, the isolation of runners, the sandboxed processes of candidates, is checked at once, because
    the caller may do long work before the first candidate is judged. Raises IsolationUnavailable if runners
    cannot be isolated, and UserError if both `pool.service` and `pool.judges` are set.
    """
    if params.pool.service:
        if params.pool.judges:
            raise UserError("pool.service: pool.judges starts other judges; set pool.judges to 0.")
        return HttpPool(params, verdicts)
    if not params.pool.judges:
        check_isolation(params.sandbox, params.device)
    return LocalPool(params, verdicts, use_service=use_service, trains=trains)


def judge_workdir(
    params: Params,
    workdir: Path,
    task: Path | None,
    folder: Path,
    report: Report = ignore,
    *,
    against: Path | None = None,
) -> Verdict:
    """Return the verdict on a candidate, which is compared with eager, and with torch.compile or `against`.

    A candidate is an implementation of a task's module. `workdir`, and `against` for another candidate, are
    workspaces (folders with model_new.py and kernels/) or single Python files. `task` is the path of a task
    file; if it is None, the task is the workspace's model.py. If the parameter `pool.service` is set, the
    HTTP service at this address judges. Otherwise the service whose socket is in `folder` judges, or, if none
    runs there, a new judge that keeps its builds in `folder`. `report` is called with the name of each step
    when it begins. If the judge itself fails, the verdict has the status `infrastructure`. Raises UserError
    if a file is missing or not valid, or if no judge can be started here.
    """
    files, others = read_candidate(workdir), None if against is None else read_candidate(against)
    if others is not None and "model_new.py" not in others:
        raise UserError(f"--against {against}: has no model_new.py; give a workspace or a Python file.")
    if task is None and workdir.is_file():
        raise UserError(f"{workdir}: a single file has no task; give its task file with --task.")
    kernel_task = load_task(task if task is not None else workdir / "model.py")
    if params.pool.service:
        judge: Judge | ServiceClient = ServiceClient(params)
    else:
        judge = connect(params, folder) or start_judge(params, folder, report)
    with contextlib.closing(judge):
        try:
            return judge.verdict(kernel_task, files, compare_compile=True, against=others, report=report)
        except InfrastructureError as error:
            return infrastructure_verdict(params, error)


def start_judge(params: Params, folder: Path, report: Report) -> Judge:
    """Start the processes of a new judge, import torch while they start, and return the judge.

    `folder` is where the judge keeps its builds. `report` is called with a text for the user, who has to wait
    for the start. Raises UserError if the judge cannot be started here; the processes are then ended.
    """
    factory = open_factory(params.sandbox, params.device, folder)
    report("starting a judge; cuda-agent serve keeps one ready")
    try:
        factory.prepare()
        from components.judge.judge import Judge

        return Judge(params, folder, factory=factory)
    except BaseException:
        factory.close()
        raise


class HttpPool(LocalPool):
    """Pool whose judge is the service at `pool.service`, and whose journal is on this machine.

    The journal is a folder of stored verdicts. An epoch is the caller's name for a set of judgements (`Job`).
    Requests to the service identify a measurement of a candidate (an implementation of a task's module) by a
    number, and not by an epoch. This pool therefore numbers the epochs of each candidate and task from 1, in
    the order in which they first occur in jobs. The numbers are stored in the journal's folder, so that a run
    that continues gets the same measurements.
    """

    def start(self) -> ServiceClient:
        return ServiceClient(self.params)

    def ask(self, job: Job) -> Verdict:
        judge = self.judge
        assert isinstance(judge, ServiceClient)
        return judge.verdict(
            job.task,
            dict(job.candidate.files),
            compare_compile=job.compare_compile,
            measurement=self._number(job),
        )

    def _number(self, job: Job) -> int:
        subject = digest_json([self.protocol, job.task.task_id, job.candidate.digest])
        path = self.verdicts / "measurements" / subject[:2] / f"{subject}.json"
        with self.lock:
            epochs: list[str] = read_json(path) if path.exists() else []
            if job.epoch not in epochs:
                epochs.append(job.epoch)
                write_json(path, epochs)
        return epochs.index(job.epoch) + 1
