"""What a server is told at its start, besides its model."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Names and limits.

    Args:
        model_name: what requests call the model.
        api_key: what requests must bear; None lets everyone in.
        max_body_bytes: longest body of a request.
        max_waiting: most continuations that wait for the engine; more are refused with 429.
        timeout_seconds: from the arrival of a request to the end of its response.
        drain_seconds: what running requests get at the first signal to end.
    """

    model_name: str
    api_key: str | None = None
    max_body_bytes: int = 20 * 2**20  # a photo of 15 MB as a data: URL
    max_waiting: int = 512
    timeout_seconds: float = 600.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("model_name", "api_key"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty")
        for name in ("max_body_bytes", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        if not (self.timeout_seconds > 0 and math.isfinite(self.timeout_seconds)):
            raise ValueError(f"timeout_seconds={self.timeout_seconds}: expected more than 0")
        if not (self.drain_seconds >= 0 and math.isfinite(self.drain_seconds)):
            raise ValueError(f"drain_seconds={self.drain_seconds}: expected at least 0")
