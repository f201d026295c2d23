"""What an engine has done and holds, in numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """`waiting`, `running` and `pages_used` are of now, everything else adds up from the start.

    Tuples have an entry for each cache group, over all replicas. `host_seconds` are those of
    `step_seconds` in which the host was waiting neither for the device nor for the compiler; it
    works while the device does, so that they cost time only where they exceed the device's.
    """

    waiting: int
    running: int
    preemptions: int
    prompt_tokens: int  # of requests that were added
    generated_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    steps: int
    step_seconds: float
    host_seconds: float
    pages_used: tuple[int, ...]
    pages_total: tuple[int, ...]
