"""Durable queue of the service's jobs, in an SQLite database.

A job is a request for a verdict on a candidate (an implementation of a PyTorch module) or for an admission
(the check whether a task can be judged). A job that is queued or running when the process ends is queued when
the store is opened again, but fails if the process ended three times while the job ran. The text of a request
is deleted when its job ends; the result itself is in the journal, a folder with one file for each verdict or
admission. Jobs that ended long ago are deleted.
"""

import sqlite3
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

State = Literal["queued", "running", "done", "failed", "cancelled"]
Kind = Literal["judgement", "admission"]
# Jobs that are deleted at a time.
BATCH = 100

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    token TEXT NOT NULL,
    subject TEXT NOT NULL,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    task_id TEXT NOT NULL,
    measurement INTEGER NOT NULL,
    changed REAL NOT NULL,
    body TEXT NOT NULL,
    size INTEGER NOT NULL DEFAULT 0,
    error TEXT NOT NULL DEFAULT '',
    status INTEGER NOT NULL DEFAULT 200,
    attempts INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS queued ON jobs (token, seq) WHERE state = 'queued';
CREATE INDEX IF NOT EXISTS sizes ON jobs (token, size) WHERE state IN ('queued', 'running');
CREATE INDEX IF NOT EXISTS subjects ON jobs (subject);
CREATE INDEX IF NOT EXISTS ended ON jobs (changed) WHERE state NOT IN ('queued', 'running');
UPDATE jobs SET state = 'failed', status = 503, body = '', changed = strftime('%s', 'now'),
    error = 'the service ended three times while it worked on this job.'
    WHERE state = 'running' AND attempts > 2;
UPDATE jobs SET state = 'queued' WHERE state = 'running';
"""


@dataclass(frozen=True)
class StoredJob:
    """One job, a request for a verdict on a candidate or for an admission of a task, as it is stored.

    `id` is the key of the job's result in the journal, the folder of results. `token` is the name of the
    caller's token. `subject` is a digest of the token, the settings, the task and the candidate (the
    implementation of a PyTorch module, to be judged), so all measurements of a candidate for one token have
    the same subject. The subject of an admission (the check whether a task can be judged) equals `id`.
    `measurement` is the number of the measurement, from 1 on. `changed` is the time (seconds of Unix time) of
    the submission or of the last change of the state, and `body` the request as JSON. Of a job that failed,
    `error` is the text, `status` the HTTP status, and `reason` a word for the cause, such as `judge`, or "".
    `size` is the number of bytes of the request. `seq` is the place of the job in the order of submissions,
    and `attempts` the number of times that a process has begun the job.
    """

    id: str
    token: str
    subject: str
    kind: Kind
    task_id: str
    body: str
    state: State = "queued"
    measurement: int = 1
    changed: float = field(default_factory=time.time)
    error: str = ""
    status: int = 200
    reason: str = ""
    size: int = 0
    seq: int = 0
    attempts: int = 0


class JobStore:
    """A queue of jobs in the SQLite database `path`, which all threads of this process may use.

    A job is a request for a verdict on a candidate (an implementation of a PyTorch module) or for an
    admission (the check whether candidates of a module can be judged).
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lock = threading.RLock()
        self.database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self.database.row_factory = sqlite3.Row
        self.database.execute("PRAGMA journal_mode = WAL")
        self.database.execute("PRAGMA synchronous = NORMAL")  # survives a kill of the process
        self.database.executescript(SCHEMA)
        if "reason" not in [row["name"] for row in self._rows("PRAGMA table_info(jobs)")]:  # an older queue
            self._rows("ALTER TABLE jobs ADD COLUMN reason TEXT NOT NULL DEFAULT ''")

    def _rows(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        with self.lock:
            return self.database.execute(statement, values).fetchall()

    def get(self, job_id: str) -> StoredJob | None:
        rows = self._rows("SELECT * FROM jobs WHERE id = ?", job_id)
        return StoredJob(**rows[0]) if rows else None

    def put(self, job: StoredJob) -> None:
        """Add a job at the end of the queue, in place of the job with the same id if there is one."""
        job = replace(job, size=len(job.body.encode()))
        columns = [name for name in vars(job) if name != "seq"]
        self._rows(
            f"INSERT OR REPLACE INTO jobs ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})",
            *(vars(job)[name] for name in columns),
        )

    def waiting(self) -> dict[str, StoredJob]:
        """Return the first queued job of each token (caller) that has one, by the token's name."""
        rows = self._rows(
            "SELECT * FROM jobs WHERE seq IN "
            "(SELECT min(seq) FROM jobs WHERE state = 'queued' GROUP BY token)"
        )
        return {row["token"]: StoredJob(**row) for row in rows}

    def move(self, job_id: str, state: State, *before: State) -> bool:
        """Set the state of a job to `state` if its state is one of `before`, and return whether it was set.

        If `state` is running, one more attempt is counted. If it is cancelled, the request's text is deleted.
        """
        marks = ", ".join("?" * len(before))
        return bool(
            self._rows(
                "UPDATE jobs SET state = ?1, attempts = attempts + (?1 = 'running'), changed = ?2, "
                "body = CASE ?1 WHEN 'cancelled' THEN '' ELSE body END "
                f"WHERE id = ?3 AND state IN ({marks}) RETURNING seq",
                *(state, time.time(), job_id, *before),
            )
        )

    def finish(self, job_id: str, state: State, error: str, status: int, reason: str) -> None:
        self._rows(
            "UPDATE jobs SET state = ?, error = ?, status = ?, reason = ?, changed = ?, body = '' "
            "WHERE id = ?",
            *(state, error, status, reason, time.time(), job_id),
        )

    def delete_ended(self, moment: float) -> list[str]:
        """Delete up to BATCH jobs that ended before `moment` (Unix time, seconds), and return their ids.

        `measurements` does not count deleted jobs.
        """
        rows = self._rows(
            "DELETE FROM jobs WHERE seq IN (SELECT seq FROM jobs "
            "WHERE state NOT IN ('queued', 'running') AND changed < ? LIMIT ?) RETURNING id",
            moment,
            BATCH,
        )
        return [str(row["id"]) for row in rows]

    def active(self, token: str | None = None) -> tuple[int, int]:
        """Return the number of the jobs that are queued or running, and the bytes of their requests.

        Only jobs of the token (caller) named `token` are counted, or those of all tokens if it is None.
        """
        condition = "" if token is None else " AND token = ?"
        statement = f"SELECT count(*), sum(size) FROM jobs WHERE state IN ('queued', 'running'){condition}"
        row = self._rows(statement, *(() if token is None else (token,)))[0]
        return int(row[0]), int(row[1] or 0)

    def position(self, job: StoredJob) -> int:
        """Return the place of a job among the queued jobs of its token (caller), from 1 on.

        It is the number of these jobs up to and including this one. If the job is not queued, it is the
        number of queued jobs that were submitted before it.
        """
        statement = "SELECT count(*) FROM jobs WHERE state = 'queued' AND token = ? AND seq <= ?"
        return int(self._rows(statement, job.token, job.seq)[0][0])

    def measurements(self, subject: str) -> int:
        """Return how many jobs have this subject, without cancelled ones.

        A subject stands for a token (caller), a candidate (the implementation of a PyTorch module, to be
        judged), its task and the settings. The result is the number of measurements that this token has
        requested of this candidate.
        """
        (found,) = self._rows("SELECT count(*) FROM jobs WHERE subject = ? AND state != 'cancelled'", subject)
        return int(found[0])

    def close(self) -> None:
        with self.lock:
            self.database.close()
