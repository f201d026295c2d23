"""`RequestError`: what is wrong with a request, in OpenAI's shape."""

from typing import Any


class RequestError(ValueError):
    """A request that cannot be served.

    Args:
        status: HTTP status, 400 to 599.
        message: what was asked, what is possible, what to do.
        param: the parameter that is to blame, such as "temperature" or "messages[0].content".
        code: a name for programs, such as "context_length_exceeded".
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        if status == 429:
            self.type = "rate_limit_error"
        else:
            self.type = "invalid_request_error" if status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        names = ("message", "type", "param", "code")
        return {"error": {name: getattr(self, name) for name in names}}
