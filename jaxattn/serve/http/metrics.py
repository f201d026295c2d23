"""What a server measures, for Prometheus: a registry of its own, so that servers do not mix."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxattn.engine.stats import EngineStats

_WINDOW_SECONDS = 10.0  # that tokens per second are measured over
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW = (*_FAST[3:], 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Counts and times of requests and tokens. Threads may share it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "jaxattn_http_requests",
            "Requests by path, method and status; 499 is a client that went away.",
            ("path", "method", "status"),
            registry=self.registry,
        )
        self._duration = Histogram(
            "jaxattn_request_duration_seconds",
            "From the arrival of a request to the end of its response.",
            ("path",),
            buckets=_SLOW,
            registry=self.registry,
        )
        self._first = Histogram(
            "jaxattn_time_to_first_token_seconds",
            "From the arrival of a request to the first token of a continuation.",
            buckets=_SLOW,
            registry=self.registry,
        )
        self._between = Histogram(
            "jaxattn_time_between_tokens_seconds",
            "Between two tokens of a continuation.",
            buckets=_FAST,
            registry=self.registry,
        )
        self._recent: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    def request(self, path: str, method: str, status: int, seconds: float) -> None:
        """A request has been answered."""
        self._requests.labels(path, method, str(status)).inc()
        self._duration.labels(path).observe(seconds)

    def first_tokens(self, seconds: float, count: int) -> None:
        """A continuation has its first tokens."""
        self._first.observe(seconds)
        self._count(count)

    def next_tokens(self, seconds: float, count: int) -> None:
        """A continuation has more tokens, this long after the last one."""
        for _ in range(count):
            self._between.observe(seconds / count)
        self._count(count)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of the last seconds."""
        self._count(0)
        with self._lock:
            return sum(count for _, count in self._recent) / _WINDOW_SECONDS

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        """Report an engine as well."""
        self.registry.register(_EngineCollector(stats, self))

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)

    def _count(self, tokens: int) -> None:
        now = time.monotonic()
        with self._lock:
            if tokens:
                self._recent.append((now, tokens))
            while self._recent and self._recent[0][0] < now - _WINDOW_SECONDS:
                self._recent.popleft()


class _EngineCollector(Collector):
    """The engine's own numbers, as they are when they are asked for."""

    def __init__(self, stats: Callable[[], EngineStats], metrics: Metrics):
        self._stats = stats
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauges = {
            "sequences_waiting": ("Continuations in the engine's queue.", stats.waiting),
            "sequences_running": ("Continuations that run.", stats.running),
            "generated_tokens_per_second": (
                f"New tokens per second, over {_WINDOW_SECONDS:.0f} seconds.",
                self._metrics.tokens_per_second,
            ),
        }
        for name, (help_text, value) in gauges.items():
            yield GaugeMetricFamily(f"jaxattn_{name}", help_text, value)
        counters = {
            "prompt_tokens": ("Tokens of prompts.", stats.prompt_tokens),
            "generated_tokens": ("New tokens.", stats.generated_tokens),
            "preemptions": ("Continuations that had to give back their pages.", stats.preemptions),
            "prefix_query_tokens": ("Prompt tokens looked up.", stats.prefix_query_tokens),
            "prefix_hit_tokens": ("Prompt tokens found in the cache.", stats.prefix_hit_tokens),
            "steps": ("Steps of the engine.", stats.steps),
            "step_seconds": ("Time of all steps.", stats.step_seconds),
            "host_seconds": ("The part of it that the host took.", stats.host_seconds),
        }
        for name, (help_text, value) in counters.items():
            yield CounterMetricFamily(f"jaxattn_{name}", help_text, value)
        used = GaugeMetricFamily("jaxattn_cache_pages_used", "Pages in use.", labels=("group",))
        total = GaugeMetricFamily("jaxattn_cache_pages", "Pages there are.", labels=("group",))
        for group, (pages_used, pages) in enumerate(
            zip(stats.pages_used, stats.pages_total, strict=True)
        ):
            used.add_metric((str(group),), pages_used)
            total.add_metric((str(group),), pages)
        yield used
        yield total
