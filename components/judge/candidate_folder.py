"""Reading and judging of a candidate that is a workspace folder or a single Python file."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from components.core.errors import InfrastructureError, UserError
from components.core.params import Params
from components.core.progress import Report, ignore
from components.core.task import load_task
from components.judge.pool.http_pool import ServiceClient, connect
from components.judge.pool.local_pool import infrastructure_verdict
from components.judge.verdict import Verdict
from components.sandbox.build import open_factory

if TYPE_CHECKING:
    from components.judge.judge import Judge

MAX_FILE_BYTES = 1 << 20
MAX_FILES = 200


def read_workspace(workdir: Path) -> dict[str, str]:
    """Return the texts of `model_new.py` and `kernels/*` in a workspace, by path relative to the workspace.

    A file that does not exist is left out. Raises UserError if the folder does not exist, or if it has links,
    too many files, large files, or files that are not UTF-8 text.
    """
    if not workdir.is_dir():
        raise UserError(f"{workdir}: no such folder; give a workspace with model_new.py and kernels/.")
    files = {}
    kernels = workdir / "kernels"
    if kernels.is_symlink():
        raise UserError(f"{kernels}: a symbolic link; replace it by a folder.")
    paths = [workdir / "model_new.py", *sorted(itertools.islice(kernels.glob("*"), MAX_FILES + 1))]
    if len(paths) > MAX_FILES + 1:
        raise UserError(f"{kernels}: more than {MAX_FILES} files; a candidate has a few sources.")
    for path in paths:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UserError(f"{path}: only plain files are judged; replace it by a file.")
        if path.is_file():
            files[path.relative_to(workdir).as_posix()] = _read(path)
    return files


def _read(path: Path) -> str:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise UserError(f"{path}: larger than {MAX_FILE_BYTES} bytes; a candidate's file is source text.")
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 text ({error.reason}); a candidate's file is source text."
        ) from error


def read_candidate(path: Path) -> dict[str, str]:
    """Return the files of a candidate, which is a workspace or a single Python file, by workspace path.

    Raises UserError if the path does not exist or has a file that cannot be judged.
    """
    return {"model_new.py": _read(path)} if path.is_file() else read_workspace(path)


def judge_workdir(
    params: Params, workdir: Path, task: Path | None, folder: Path, report: Report = ignore
) -> Verdict:
    """Return the verdict on a candidate, which is compared with eager and torch.compile.

    `workdir` is a workspace or a single Python file. `task` is the path of a task file; if it is None, the
    task is the workspace's model.py. If the parameter `pool.service` is set, the HTTP service at this address
    judges. Otherwise the service whose socket is in `folder` judges, or, if none runs there, a new judge that
    keeps its builds in `folder`. `report` is called with the name of each step when it begins. If the judge
    itself fails, the verdict has the status `infrastructure`. Raises UserError if a file is missing or not
    valid.
    """
    files = read_candidate(workdir)
    if task is None and workdir.is_file():
        raise UserError(f"{workdir}: a single file has no task; give its task file with --task.")
    kernel_task = load_task(task if task is not None else workdir / "model.py")
    with contextlib.closing(_open_judge(params, folder, report)) as judge:
        try:
            return judge.verdict(kernel_task, files, compare_compile=True, report=report)
        except InfrastructureError as error:
            return infrastructure_verdict(params, error)


def _open_judge(params: Params, folder: Path, report: Report) -> Judge | ServiceClient:
    if params.pool.service:
        return ServiceClient(params)
    return connect(params, folder) or start_judge(params, folder, report)


def start_judge(params: Params, folder: Path, report: Report) -> Judge:
    """Start the processes of a new judge, import torch at the same time as they do, and return the judge.

    `folder` is where the judge keeps its builds. `report` is called with a text for the user, who has to wait
    for the start.
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
