"""The engine: `step()` is schedule, run, settle. Token ids in, token ids and text out."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequences

import numpy as np
from jax.sharding import Mesh

from jaxattn.cache.pages import PageAllocator
from jaxattn.cache.plan import CachePlan, group_layers
from jaxattn.cache.sizing import capacity, cdiv, pool_pages, table_width, worst_demand
from jaxattn.engine.errors import PromptTooLongError
from jaxattn.engine.images import PlacedImage
from jaxattn.engine.outputs import Logprob
from jaxattn.engine.runner import Dispatched, Results, Runner
from jaxattn.engine.sampler import TopLogprobs
from jaxattn.engine.scheduler import STEPS_IN_FLIGHT, Scheduled, Scheduler
from jaxattn.engine.sequence import Sequence, TextStream
from jaxattn.engine.stats import EngineStats
from jaxattn.models.gemma3.config import Gemma3Config
from jaxattn.models.gemma3.model import Gemma3, layer_specs
from jaxattn.models.gemma3.sharding import shared_config
from jaxattn.registry import Backend, Need, Target, select
from jaxattn.sampling import SamplingParams
from jaxattn.sharding import HEADS
from jaxattn.spec import check_positive_int


class Engine:
    """Continuations of many prompts on one model, a paged cache and a few compiled shapes.

    Not thread safe: one thread owns it.

    Args:
        model: its `dtype` is that of activations. On a mesh its config is that of
            `shared_config`, and its weights lie as `weight_specs` says.
        eos_ids: tokens that end a continuation.
        kv_dtype: stored type of keys and values.
        page_size: tokens of a page.
        max_model_len: most tokens of a sequence, prompt included.
        max_num_seqs: most sequences that run at a time, on each replica.
        max_num_batched_tokens: most tokens of a step; longer prompts are computed in chunks. With a
            vision tower a step must hold an image and a token of each other sequence.
        memory: bytes of the cache of one replica, over all of its devices. None: what
            `max_num_seqs` sequences of `max_model_len` need.
        expected_len: tokens of a typical sequence, None: a quarter of `max_model_len`. `memory` is
            divided among the groups for as many of these as possible.
        hybrid_kv_cache: whether windowed layers keep only what their window can see. Outputs are
            the same either way.
        prefix_reuse: whether requests that begin alike share pages. Outputs are the same.
        backend: attention backend, see `jaxattn.ragged_paged_attention`.
        mesh: see `Runner`. A request runs on one replica, the one with least to do.
        token_text: the text of one token id, for the reports of log-probabilities.
    """

    def __init__(
        self,
        model: Gemma3,
        *,
        eos_ids: tuple[int, ...],
        kv_dtype: str,
        page_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        memory: int | None = None,
        expected_len: int | None = None,
        hybrid_kv_cache: bool = True,
        prefix_reuse: bool = True,
        backend: str | Backend | None = None,
        mesh: Mesh | None = None,
        token_text: Callable[[int], str] = str,
    ):
        self.plan, self.num_pages = plan_engine(
            model.config,
            dtype=model.dtype,
            kv_dtype=kv_dtype,
            page_size=page_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            memory=memory,
            expected_len=expected_len,
            hybrid_kv_cache=hybrid_kv_cache,
            prefix_reuse=prefix_reuse,
            backend=backend,
            tensor_parallel=mesh.shape[HEADS] if mesh else 1,
        )
        self.vocab_size = model.config.vocab_size
        self.vision = model.config.vision
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_ids = eos_ids
        self.buckets = token_buckets(max_num_seqs, max_num_batched_tokens)
        self.runner = Runner(
            model,
            self.plan,
            num_pages=self.num_pages,
            widths=table_widths(self.plan, max_model_len, max_num_batched_tokens),
            max_num_seqs=max_num_seqs,
            buckets=self.buckets,
            backend=backend,
            mesh=mesh,
        )
        self._prefix_reuse = prefix_reuse
        self.schedulers = [
            Scheduler(
                self._new_allocator(),
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                buckets=self.buckets,
            )
            for _ in range(self.runner.num_replicas)
        ]
        self._token_text = token_text
        self._next_id = 0
        self._in_flight: deque[Dispatched] = deque()
        self._scheduled: list[list[Scheduled]] = []
        self._broken = False
        self._news: list[Sequence] = []
        self._steps = self._prompt_tokens = self._generated_tokens = 0
        self._step_seconds = self._wait_seconds = 0.0

    def _new_allocator(self) -> PageAllocator:
        return PageAllocator(self.plan, self.num_pages, prefix_reuse=self._prefix_reuse)

    @property
    def has_work(self) -> bool:
        """Whether a sequence is waiting or running, or a step is not settled."""
        return bool(self._in_flight) or any(each.has_work for each in self.schedulers)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(tokens, sequences) of every step that is ever compiled, on each replica.

        With a vision tower each is compiled twice: for text alone, and with images.
        """
        return tuple((size, min(size, self.schedulers[0].max_num_seqs)) for size in self.buckets)

    def precompile(self, progress: Callable[[int], None] = lambda done: None) -> None:
        """Compile all steps now, before requests; `progress(how many are done)`."""
        if self.has_work:
            raise RuntimeError("precompile before there are requests, or once they are done")
        self.runner.precompile(progress)

    def capacity(self, length: int) -> int:
        """How many sequences of `length` tokens can run at a time, over all replicas."""
        held = capacity(
            self.plan, self.num_pages, length=length, step_tokens=self.max_num_batched_tokens
        )
        return min(held, self.schedulers[0].max_num_seqs) * len(self.schedulers)

    def describe_cache(self) -> str:
        """Bytes, tokens, and how many sequences of some lengths run at a time."""
        replicas = len(self.schedulers)
        sizes = [self.plan.page_bytes(group) * n for group, n in enumerate(self.num_pages)]
        keepers = [
            (n - 1) * group.store.page_size
            for group, n in zip(self.plan.groups, self.num_pages, strict=True)
            if group.store.retention is None
        ]
        tokens = f" for {replicas * min(keepers):,} tokens" if keepers else ""
        lengths = sorted({max(2, self.max_model_len // part) for part in (16, 4, 1)})
        # The longest that a number of sequences may be.
        longest = {self.capacity(each): each for each in lengths}
        running = " or ".join(f"{count:,} of {each:,}" for count, each in longest.items())
        return (
            f"KV cache: {replicas * sum(sizes) / 2**20:,.0f} MiB{tokens}; "
            f"sequences that run at a time, and their most tokens: {running}"
        )

    def stats(self) -> EngineStats:
        """What it has done and holds."""
        total, free = np.zeros((2, len(self.plan.groups)), int)
        for each in self.schedulers:
            total += np.subtract(self.num_pages, 1)
            free += each.allocator.free_pages
        return EngineStats(
            waiting=sum(len(each.waiting) for each in self.schedulers),
            running=sum(len(each.running) for each in self.schedulers),
            preemptions=sum(each.num_preemptions for each in self.schedulers),
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            prefix_query_tokens=sum(each.prefix_query_tokens for each in self.schedulers),
            prefix_hit_tokens=sum(each.prefix_hit_tokens for each in self.schedulers),
            steps=self._steps,
            step_seconds=self._step_seconds,
            host_seconds=self._step_seconds - self._wait_seconds,
            pages_used=tuple((total - free).tolist()),
            pages_total=tuple(total.tolist()),
        )

    def check_prompt(self, token_ids: Sequences[int], images: Sequences[PlacedImage] = ()) -> None:
        """Raise ValueError for a prompt that cannot be served.

        `images`: in order, each with its id at all of its tokens.
        """
        if not token_ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        of_images = {each.image.token_id for each in images}
        wrong = [
            token
            for token in token_ids
            if not 0 <= token < self.vocab_size and token not in of_images
        ]
        if wrong:
            raise ValueError(f"token ids {wrong[:8]} are outside 0 to {self.vocab_size - 1}")
        if len(token_ids) >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens; max_model_len={self.max_model_len} "
                f"leaves room for {self.max_model_len - 1} and one new token: shorten the prompt "
                "or raise max_model_len"
            )
        for each in images:
            if self.vision is None:
                raise ValueError("this model has no vision tower: it takes no images")
            own = token_ids[each.start : each.end]
            assert set(own) == {each.image.token_id}, "an image is not where it should be"
            assert len(own) == self.vision.tokens_per_image

    def add(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        stream: TextStream,
        images: Sequences[PlacedImage] = (),
        prompt_index: int = 0,
        index: int = 0,
    ) -> Sequence:
        """Queue one continuation of a prompt (see `check_prompt`)."""
        self.check_prompt(prompt_token_ids, images)
        if self._broken:
            self._recover()
        sequence = Sequence(
            self._next_id,
            prompt_token_ids,
            params,
            prompt_index=prompt_index,
            index=index,
            seed=seed,
            max_len=self.max_model_len,
            eos_ids=self.eos_ids,
            stream=stream,
            images=images,
        )
        self._next_id += 1
        self._prompt_tokens += sequence.num_prompt
        min(self.schedulers, key=lambda each: each.num_requests).add(sequence)
        return sequence

    def step(self) -> list[Sequence]:
        """Schedule, run, settle: starts a step, and settles the one before it meanwhile.

        Returns the sequences with news: new tokens, or an end. A step that fails ends its
        sequences with the finish reason "error"; others begin again.
        """
        start = time.perf_counter()
        self._news = []
        if self._broken:
            self._recover()
        stuck = False
        try:
            started = self._start()
            if self._in_flight and (len(self._in_flight) == STEPS_IN_FLIGHT or not started):
                self._settle(self._in_flight[0], self._fetch(self._in_flight[0]))
                self._in_flight.popleft()
            else:
                stuck = not started
        except Exception as error:
            self._fail(error)
        except BaseException:  # Ctrl-C: the buffers may be gone, and with them everything
            self._broken = True  # the next step finishes it, if Ctrl-C comes again meanwhile
            self._recover()
            raise
        self._step_seconds += time.perf_counter() - start
        assert not (stuck and self.has_work), "nobody can go on: pools too small"
        return self._news

    def _recover(self) -> None:
        """Drop everything after an interrupt."""
        self._fail(RuntimeError("interrupted"))
        self.abort(self._all())
        self._broken = False

    def _start(self) -> bool:
        """Schedule a step and start it; False if there is nothing to compute now.

        A step of a new shape is held back while another runs: compiling takes seconds, which
        that one's news need not wait for.
        """
        if not any(self._scheduled):
            self._scheduled = [each.schedule() for each in self.schedulers]
        if not any(self._scheduled):
            return False
        if self._in_flight and not self.runner.is_compiled(self._scheduled):
            return False
        start, is_new = time.perf_counter(), not self.runner.is_compiled(self._scheduled)
        allocators = [each.allocator for each in self.schedulers]
        self._in_flight.append(self.runner.dispatch(self._scheduled, allocators))
        self._scheduled = []
        if is_new:
            self._wait_seconds += time.perf_counter() - start
        self._steps += 1
        return True

    def _fetch(self, step: Dispatched) -> Results:
        start = time.perf_counter()
        try:
            return step.fetch()
        finally:
            self._wait_seconds += time.perf_counter() - start

    def _settle(self, step: Dispatched, results: Results) -> None:
        """Give every sequence of a step what was computed for it."""
        for replica, (scheduler, shares) in enumerate(
            zip(self.schedulers, step.shares, strict=True)
        ):
            scheduler.settle(shares)
            flat = 0
            for row, share in enumerate(shares):
                sequence = share.sequence
                if sequence.finish_reason is None:
                    self._news.append(sequence)
                    try:
                        self._tell(sequence, share, results, replica, row, flat)
                    except Exception as error:  # of its text alone; nobody else is touched
                        sequence.end("error", error)
                    if sequence.finish_reason is not None:
                        scheduler.finish(sequence)
                flat += share.num_tokens

    def _tell(
        self,
        sequence: Sequence,
        share: Scheduled,
        results: Results,
        replica: int,
        row: int,
        flat: int,
    ) -> None:
        """Give a sequence its results: those of `row`, and of the tokens from `flat` on."""
        if results.prompt_logprobs is not None:
            self._score_prompt(sequence, share, results.prompt_logprobs.of(replica), flat)
        if share.samples:
            token = int(results.chosen[replica, row])
            if results.logprobs is not None:
                self._score(sequence, token, results.logprobs.of(replica), row)
            sequence.add_token(token)
            self._generated_tokens += 1

    def _score(self, sequence: Sequence, token: int, scores: TopLogprobs, row: int) -> None:
        """Report a chosen token's log-probability, if that is asked for."""
        top = sequence.params.logprobs
        if top is not None:
            sequence.logprobs.append(self._report(scores, row, token, top))

    def _score_prompt(
        self, sequence: Sequence, share: Scheduled, scores: TopLogprobs, flat: int
    ) -> None:
        """Report the prompt tokens that follow a share's tokens; `flat` is its first row.

        None for those of images: nothing predicts them.
        """
        top = sequence.params.prompt_logprobs
        if top is None:
            return
        for offset in range(share.num_tokens):
            position = share.start + offset + 1
            if position == len(sequence.prompt_logprobs) + 1 and position < sequence.num_prompt:
                token = sequence.tokens[position]
                report = None
                if token < self.vocab_size:
                    report = self._report(scores, flat + offset, token, top)
                sequence.prompt_logprobs.append(report)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """End sequences, waiting or running, and free their pages. Finished ones stay."""
        for sequence in sequences:
            if sequence.finish_reason is None:
                for scheduler in self.schedulers:
                    scheduler.finish(sequence)
                sequence.end("abort")  # last: an abort that is interrupted can be repeated

    def clear(self) -> None:
        """Abort everything and wait for the steps that run."""
        self.abort(self._all())
        while self.has_work:
            self.step()

    def _all(self) -> list[Sequence]:
        return [
            sequence
            for scheduler in self.schedulers
            for sequence in (*scheduler.running, *scheduler.waiting)
        ]

    def _fail(self, error: Exception) -> None:
        """End the sequences of the steps that are lost; the cache is, for everybody.

        All sequences end if there is no step to blame: it may happen again, and again.
        """
        steps = [*self._scheduled, *(shares for step in self._in_flight for shares in step.shares)]
        lost = {share.sequence.id: share.sequence for step in steps for share in step}
        lost = lost or {sequence.id: sequence for sequence in self._all()}
        self._in_flight.clear()
        self._scheduled = []
        for scheduler in self.schedulers:
            scheduler.restart(self._new_allocator())
        for sequence in lost.values():
            if sequence.finish_reason is None:
                sequence.end("error", error)
                if sequence not in self._news:  # the step failed after it had a token
                    self._news.append(sequence)
            for scheduler in self.schedulers:
                scheduler.finish(sequence)
        self.runner.reset()

    def _report(self, scores: TopLogprobs, row: int, token: int, top: int) -> dict[int, Logprob]:
        """The given token first, then the `top` most likely ones."""
        entries = [(token, float(scores.logprob[row]), int(scores.rank[row]))]
        for rank in range(min(top, scores.top_ids.shape[1])):
            likely = int(scores.top_ids[row, rank])
            entries.append((likely, float(scores.top_logprobs[row, rank]), rank + 1))
        report: dict[int, Logprob] = {}
        for each, logprob, rank in entries:
            report.setdefault(each, Logprob(logprob, rank, self._token_text(each)))
        return report


def plan_engine(
    config: Gemma3Config,
    *,
    dtype: str,
    kv_dtype: str,
    page_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    memory: int | None = None,
    expected_len: int | None = None,
    hybrid_kv_cache: bool = True,
    prefix_reuse: bool = True,
    backend: str | Backend | None = None,
    tensor_parallel: int = 1,
    target: Target | None = None,
) -> tuple[CachePlan, tuple[int, ...]]:
    """The cache plan of an engine and the pages of each group's pool, the null page included.

    See `Engine` for the arguments; `dtype` is the activations', `target` the device that is
    planned for (default: the one in use). Kv heads that `tensor_parallel` devices repeat count as
    often as they are stored. Needs no weights, so that options are refused before they are loaded:
    ValueError, TypeError, UnsupportedAttentionError.
    """
    check_positive_int("max_num_seqs", max_num_seqs)
    check_positive_int("max_num_batched_tokens", max_num_batched_tokens)
    check_positive_int("max_model_len", max_model_len)
    for name, value in (("memory", memory), ("expected_len", expected_len)):
        if value is not None:
            check_positive_int(name, value)
    for name, value in (("hybrid_kv_cache", hybrid_kv_cache), ("prefix_reuse", prefix_reuse)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: expected True or False")
    if max_model_len < 2:
        raise ValueError(f"{max_model_len=}: a prompt token and a new token need at least 2")
    if max_model_len > config.max_position:
        raise ValueError(f"{max_model_len=}: the model's positions end at {config.max_position}")
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"{max_num_batched_tokens=} is less than {max_num_seqs=}: a step must hold one "
            "token of every sequence"
        )
    if config.vision is not None:
        least = config.vision.tokens_per_image + max_num_seqs - 1
        if max_num_batched_tokens < least:
            raise ValueError(
                f"{max_num_batched_tokens=} is less than {least}: a step must hold an image "
                f"({config.vision.tokens_per_image} tokens, which see each other) and one token of "
                f"every other sequence ({max_num_seqs=}); raise it, or leave images out"
            )
    if expected_len is not None and expected_len > max_model_len:
        raise ValueError(f"{expected_len=} is longer than {max_model_len=}")
    config = shared_config(config, tensor_parallel)
    specs = layer_specs(config, page_size=page_size, kv_dtype=kv_dtype, shards=tensor_parallel)
    plan = group_layers(specs, hybrid=hybrid_kv_cache, max_len=max_model_len)
    widths = table_widths(plan, max_model_len, max_num_batched_tokens)
    for layer in plan.layers:
        need = Need(
            target=target or Target.current(),
            sliding_window=layer.mask.sliding_window,
            soft_cap=layer.mask.soft_cap,
            sinks=layer.mask.sinks,
            image_rule=layer.mask.image_rule,
            causal=layer.mask.causal,
            num_q_heads=layer.num_q_heads // tensor_parallel,
            num_kv_heads=layer.store.layout.num_kv_heads,
            head_dim=layer.store.head_dim,
            page_size=page_size,
            query_dtype=dtype,
            kv_dtype=kv_dtype,
            first_page=True,
            update_kv_cache=layer.share_kv_from is None,
            table_entries=max_num_seqs * widths[plan.group_of(layer.name)],
            interpret=False,
            tiles=None,
        )
        select(need, backend)
    if memory is None:
        pages = worst_demand(
            plan,
            max_num_seqs=max_num_seqs,
            max_len=max_model_len,
            step_tokens=STEPS_IN_FLIGHT * max_num_batched_tokens,
        )
        return plan, tuple(1 + count for count in pages)
    num_pages = pool_pages(
        plan,
        memory,
        max_len=max_model_len,
        typical_len=expected_len or cdiv(max_model_len, 4),
        step_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    return plan, num_pages


def table_widths(
    plan: CachePlan, max_model_len: int, max_num_batched_tokens: int
) -> tuple[int, ...]:
    """The most live pages of a sequence in each group, with two steps in flight."""
    return tuple(
        table_width(
            plan,
            group,
            max_len=max_model_len,
            step_tokens=STEPS_IN_FLIGHT * max_num_batched_tokens,
        )
        for group in range(len(plan.groups))
    )


def token_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """The token counts that steps are compiled for: 1, 2, powers of 2 from 8, and both limits.

    A step of so many tokens has rows for as many sequences, at most `max_num_seqs`.
    """
    sizes = [1, 2, *(8 * 2**exponent for exponent in range(32)), max_num_seqs]
    return tuple(
        sorted({size for size in sizes if size < max_num_batched_tokens} | {max_num_batched_tokens})
    )
