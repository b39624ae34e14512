"""Deletion of jobs that ended long ago, with their verdicts, so that a service does not fill its disk."""

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator

from components.judge.pool.local_pool import journal_path
from components.service.jobs import DAY, JobService

# Days for which a job is kept after its end, and seconds between two searches for older ones.
KEEP_DAYS = 30
SEARCH_SECONDS = 3600.0


def delete_old_jobs(service: JobService, moment: float) -> int:
    """Delete the jobs that ended before `moment`, a time.time(), with their verdicts; return their number.

    They are deleted in small numbers at a time, between which requests are accepted. A verdict is deleted
    after its job, so that no job is left without its verdict if the process is killed between the two.
    """
    deleted = 0
    while not service.closing:
        with service.condition:  # no request may find a verdict that is being deleted
            jobs = service.store.delete_ended(moment)
            for job in jobs:
                journal_path(service.verdicts, job).unlink(missing_ok=True)
        deleted += len(jobs)
        if not jobs:
            break
    return deleted


@contextlib.contextmanager
def retaining(service: JobService, days: float) -> Iterator[None]:
    """Delete the jobs that ended more than `days` days ago, now and every hour inside the context."""
    ending = threading.Event()

    def delete() -> None:
        while True:
            try:
                delete_old_jobs(service, time.time() - days * DAY)
            except (OSError, sqlite3.Error):  # for instance a disk that cannot be written for a while
                logging.getLogger(__name__).exception("old jobs could not be deleted")
            if ending.wait(SEARCH_SECONDS):
                return

    thread = threading.Thread(target=delete, name="retention", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
