"""Waiting for jobs in the event loop of the HTTP server."""

import asyncio
import contextlib
import time
from collections.abc import Iterator

from starlette.concurrency import run_in_threadpool

from components.service.jobs import JobService
from components.service.requests import JobView
from components.service.tokens import Token


@contextlib.contextmanager
def changes(service: JobService, job_id: str) -> Iterator[asyncio.Event]:
    """Yield an event of the running event loop that is set whenever the job's state or progress changes."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def changed() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(event.set)

    with service.watch(job_id, changed):
        yield event


async def ended(service: JobService, token: Token, job_id: str, seconds: float) -> JobView:
    """Wait for the end of a job, for at most `seconds` or until the service closes, and return its state."""
    deadline = time.monotonic() + seconds
    with changes(service, job_id) as event:
        while True:
            event.clear()
            job = await run_in_threadpool(service.view, token, job_id)
            left = deadline - time.monotonic()
            if job.has_ended or left <= 0 or service.closing:
                return job
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), left)
