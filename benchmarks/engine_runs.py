"""What `benchmarks.engine` measures of jaxattn, one function for each of its tables.

Every one runs in a process of its own and returns a flat record for JSON. `others` is the share
of the machine's processor time that other processes took meanwhile.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import Request, mixed, random_tokens, shared_prefix
from jaxattn import LLM, SamplingParams
from jaxattn.engine.sequence import Sequence

MAX_NUM_SEQS = 32
MAX_MODEL_LEN = 2048
Record = dict[str, float]


def load(**options: Any) -> LLM:
    """Gemma 3 270M in bfloat16, every step compiled."""
    llm = LLM(
        "gemma-3-270m",
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        progress=False,
        **options,
    )
    llm.precompile()
    generate(llm, [Request(random_tokens(np.random.default_rng(9), 40), 4)])
    return llm


def params(request: Request) -> SamplingParams:
    """Greedy, exactly `request.new` tokens."""
    return SamplingParams(temperature=0, max_tokens=request.new, ignore_eos=True)


def generate(llm: LLM, requests: list[Request]) -> None:
    """Run them all at once."""
    llm.generate(
        [{"prompt_token_ids": each.prompt} for each in requests],
        [params(each) for each in requests],
    )


@contextmanager
def timed(record: Record, name: str) -> Iterator[None]:
    """Adds the seconds as `name`, and the share that other processes had as `others`."""
    before, own, start = _busy(), time.process_time(), time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    record[name] = seconds
    taken = _busy() - before - (time.process_time() - own)
    record["others"] = max(record.get("others", 0.0), taken / seconds / (os.cpu_count() or 1))


def _busy() -> float:
    """Seconds of processor time that the whole machine has spent."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def throughput(repeat: int, count: int) -> Record:
    """Seconds of the mixed requests: by the engine, and in static batches."""
    llm, record = load(), Record()
    requests = mixed(repeat, count)
    # Other prompts, so that nothing is found in the cache.
    others = mixed(repeat + 500, count)

    def engine() -> None:
        with timed(record, "engine"):
            generate(llm, requests)

    def static() -> None:
        with timed(record, "static"):
            for first in range(0, count, MAX_NUM_SEQS):
                generate(llm, others[first : first + MAX_NUM_SEQS])

    for run in (engine, static) if repeat % 2 == 0 else (static, engine):
        run()
    record["prompt tokens"] = sum(len(each.prompt) for each in requests)
    record["new tokens"] = sum(each.new for each in requests)
    stats = llm.engine.stats()
    record["prefix hits"], record["preemptions"] = stats.prefix_hit_tokens, stats.preemptions
    return record


def latency(repeat: int, count: int, rate: float) -> Record:
    """Percentiles of the time to the first token and between tokens, with Poisson arrivals."""
    llm, record = load(), Record(rate=rate)
    requests = mixed(repeat, count)
    gaps = np.random.default_rng(repeat).exponential(1 / rate, count)
    due = dict(enumerate(np.cumsum(gaps)))
    times: dict[int, list[float]] = {}
    sequences: list[Sequence] = []
    running = []
    with timed(record, "seconds"):
        start = time.perf_counter()
        while len(sequences) < count or llm.engine.has_work:
            while len(sequences) < count and due[len(sequences)] <= time.perf_counter() - start:
                request = requests[len(sequences)]
                sequences.append(_add(llm, request))
            if not llm.engine.has_work:
                time.sleep(max(0.0, due[len(sequences)] - (time.perf_counter() - start)))
                continue
            news, now = llm.engine.step(), time.perf_counter() - start
            running.append(llm.engine.stats().running)
            for sequence in news:
                if sequence.error is not None:
                    raise sequence.error
                times.setdefault(sequence.id, []).extend([now] * len(sequence.take_tokens()))
    first = [times[each.id][0] - due[index] for index, each in enumerate(sequences)]
    between = np.concatenate([np.diff(times[each.id]) for each in sequences])
    for name, values in (("first", first), ("between", between)):
        for percent in (50, 90, 99):
            record[f"{name} p{percent}"] = float(np.percentile(values, percent))
    record["running"] = float(np.mean(running))
    return record


def _add(llm: LLM, request: Request) -> Sequence:
    return llm.engine.add(request.prompt, params(request), seed=0, stream=llm.tokenizer.stream())


def host_share(repeat: int, new: int) -> Record:
    """The host's part of decoding steps with 32 sequences running, from 256 tokens on."""
    llm, record = load(), Record()
    tokens = np.random.default_rng(repeat)
    sequences = [_add(llm, Request(random_tokens(tokens, 256), new)) for _ in range(MAX_NUM_SEQS)]
    while any(each.num_settled < each.num_prompt for each in sequences):
        llm.engine.step()
    before, cpu = llm.engine.stats(), time.thread_time()
    with timed(record, "seconds"):
        while all(each.finish_reason is None for each in sequences):
            llm.engine.step()
    after = llm.engine.stats()
    steps = after.steps - before.steps
    record["step ms"] = (after.step_seconds - before.step_seconds) / steps * 1e3
    record["host ms"] = (after.host_seconds - before.host_seconds) / steps * 1e3
    record["host CPU ms"] = (time.thread_time() - cpu) / steps * 1e3
    record["share"] = record["host ms"] / record["step ms"]
    return record


def prefix(repeat: int, count: int, prefix_tokens: int) -> Record:
    """Seconds and mean time to first token of requests that begin alike, reuse on and off."""
    record = Record()
    for name, reuse in (("on", True), ("off", False)):
        llm = load(prefix_reuse=reuse)
        requests = shared_prefix(repeat, count=count, prefix=prefix_tokens, new=32)
        first: dict[int, float] = {}
        with timed(record, name):
            start = time.perf_counter()
            for each in requests:
                _add(llm, each)
            while llm.engine.has_work:
                for sequence in llm.engine.step():
                    if sequence.take_tokens():
                        first.setdefault(sequence.id, time.perf_counter() - start)
        record[f"{name}, first"] = float(np.mean(list(first.values())))
        record[f"{name}, hits"] = llm.engine.stats().prefix_hit_tokens
        record["prompt tokens"] = sum(len(each.prompt) for each in requests)
    return record


RUNS: dict[str, Callable[..., Record]] = {
    "throughput": throughput,
    "latency": latency,
    "host_share": host_share,
    "prefix": prefix,
}
