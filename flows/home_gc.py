"""Find what can be removed from a home: states of finished stages, unused stages, abandoned temporary files.

A home is a folder in which runs keep everything, and a stage is a step of a run with its own folder there. A
stage is used if a run that is kept names it. A run is kept if a version that it registered has an alias or
waits for approval, if it is not finished, if it is younger than a given limit, if it is the newest one, or if
it left a stage unfinished that no later run has continued yet.
"""

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from components.core.files import atomic_write, discard
from components.storage.gc import reason_to_keep
from components.training.stage import RESULT
from flows.run_context import newest_runs, record_of

# Pattern of the folder of a stage in a text, such as stages/warmup-0123456789ab.
STAGE = re.compile(r"stages/([a-z_]+-[0-9a-f]{12})")
# File in a run's folder with the folders of the stages that the run has begun or used, one on each line.
USED = "stages.txt"
# Least age of a temporary file or folder that is taken for abandoned, in seconds.
ABANDONED_SECONDS = 86_400.0
# Folders of the home in which temporary folders are made, such as outputs that are renamed when complete.
PLACES = (".", "stages", "stages/*", "stages/*/state", "runs", "datasets", "champions", "policies")


@dataclass(frozen=True)
class Removable:
    """A file or folder that can be removed from the home (the folder of all runs), and why."""

    path: Path
    reason: str

    @property
    def bytes(self) -> int:
        paths = self.path.rglob("*") if self.path.is_dir() else [self.path]
        return sum(path.lstat().st_size for path in paths if path.is_file())

    def remove(self) -> None:
        """Remove the file, or the folder with all that it holds."""
        if self.path.is_dir():
            discard(self.path)
        else:
            self.path.unlink(missing_ok=True)


def note_use(run_folder: Path, stage: Path) -> None:
    """Record in a run's folder that the run uses the stage with the folder `stage`.

    The function `removable` then keeps the stage as long as the run.
    """
    file = run_folder / USED
    line = f"stages/{stage.name}"
    lines = file.read_text().splitlines() if file.is_file() else []
    if line not in lines:
        atomic_write(file, "".join(f"{name}\n" for name in (*lines, line)))


def removable(home: Path, references: Mapping[str, str], seconds: float) -> list[Removable]:
    """Return the files and folders of `home` that can be removed and are older than `seconds`.

    They are folders of stages that no kept run uses, files for resuming of finished stages, and temporary
    files, which must also be older than ABANDONED_SECONDS. `home` is the folder of all runs. `references`
    maps the keys of runs, and digests, to reasons to keep them (`registry.models.references`). This function
    removes nothing.
    """
    now = time.time()
    used = set(_used_stages(home, references, now - seconds))
    found = [
        Removable(stage, "no kept run uses it")
        for stage in sorted((home / "stages").glob("[a-z]*-*"))
        if stage.name not in used and stage.stat().st_mtime < now - seconds
    ]
    gone = {item.path for item in found}
    found += [
        Removable(result.parent / "state", "the stage is finished")
        for result in sorted((home / "stages").glob(f"*/{RESULT}"))
        if result.parent not in gone
        and (result.parent / "state").is_dir()
        and result.stat().st_mtime < now - seconds
    ]
    found += [
        Removable(path, "abandoned temporary folder")
        for place in PLACES
        for path in sorted(home.glob(f"{place}/.*.*"))
        if path.lstat().st_mtime < now - max(seconds, ABANDONED_SECONDS) and path.parent not in gone
    ]
    return found


def _used_stages(home: Path, references: Mapping[str, str], younger_than: float) -> Iterator[str]:
    """Yield the folder name of each stage that is named in a file of a kept run, once for each mention.

    A run is kept if one of its files was written at `younger_than` (seconds of Unix time) or later, if
    `references` has a reason to keep it, if it is the newest one, or if it left a stage unfinished that no
    run continued.
    """
    nights = {run.name: record_of(run).get("night", {}) for run in newest_runs(home)}
    continued = {(night.get("continues") or {}).get("run_id") for night in nights.values()}
    left = {run for run, night in nights.items() if night.get("unfinished")} - continued
    files = {run: (*run.glob("[!.]*.json"), *run.glob(USED)) for run in (home / "runs").glob("*")}
    ages = {run: max((file.stat().st_mtime for file in files[run]), default=0.0) for run in files}
    for run, newest in ages.items():
        is_young = newest >= min(younger_than, max(ages.values()))
        if is_young or run.name in left or reason_to_keep(run.name, dict(references)):
            for file in files[run]:
                yield from STAGE.findall(file.read_text(errors="replace"))
