"""The error with which the service answers a request."""


class ServiceError(Exception):
    """An error that is answered with an HTTP status and one sentence.

    `retry_after` is the number of seconds after which the caller may try again.
    """

    def __init__(self, status: int, message: str, *, retry_after: float | None = None):
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
