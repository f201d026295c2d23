"""The engine: `step()` is schedule, run, settle. Token ids in, token ids and text out."""

from collections.abc import Callable, Iterable

import numpy as np

from jaxattn.cache.pages import table_width
from jaxattn.cache.plan import CachePlan, group_layers
from jaxattn.engine.outputs import Logprob
from jaxattn.engine.runner import Runner
from jaxattn.engine.sampler import TopLogprobs
from jaxattn.engine.scheduler import Scheduled, Scheduler
from jaxattn.engine.sequence import Sequence, TextStream
from jaxattn.models.gemma3.config import Gemma3Config
from jaxattn.models.gemma3.model import Gemma3, layer_specs
from jaxattn.registry import Need, Target, select
from jaxattn.sampling import SamplingParams
from jaxattn.spec import check_positive_int


class Engine:
    """Continuations of many prompts on one model, one cache and a few compiled shapes.

    Args:
        model: the text model; its embedding's dtype is the activations' dtype.
        eos_ids: tokens that end a continuation.
        kv_dtype: stored type of keys and values.
        page_size: tokens of a page.
        max_model_len: most tokens of a sequence, prompt included.
        max_num_seqs: sequences in flight; the cache holds this many of `max_model_len`.
        max_num_batched_tokens: most tokens of a step; longer prompts are computed in chunks.
        hybrid_kv_cache: whether windowed layers keep only what their window can see. Outputs are
            the same either way.
        backend: attention backend, see `jaxattn.ragged_paged_attention`.
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
        hybrid_kv_cache: bool = True,
        backend: str | None = None,
        token_text: Callable[[int], str] = str,
    ):
        self.plan = plan_engine(
            model.config,
            dtype=model.embed[...].dtype.name,
            kv_dtype=kv_dtype,
            page_size=page_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            hybrid_kv_cache=hybrid_kv_cache,
            backend=backend,
        )
        self.vocab_size = model.config.vocab_size
        self.max_model_len = max_model_len
        self.eos_ids = eos_ids
        self.buckets = token_buckets(max_num_seqs, max_num_batched_tokens)
        self.runner = Runner(
            model, self.plan, max_num_seqs=max_num_seqs, buckets=self.buckets, backend=backend
        )
        self.scheduler = Scheduler(
            self.runner.allocator,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            buckets=self.buckets,
        )
        self._token_text = token_text
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        """Whether a sequence is waiting or running."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def check_prompt(self, token_ids: list[int]) -> None:
        """Raise ValueError for a prompt that cannot be served."""
        if not token_ids:
            raise ValueError("the prompt is empty: it needs at least one token")
        wrong = [token for token in token_ids if not 0 <= token < self.vocab_size]
        if wrong:
            raise ValueError(f"token ids {wrong[:8]} are outside 0 to {self.vocab_size - 1}")
        if len(token_ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens; max_model_len={self.max_model_len} "
                f"leaves room for {self.max_model_len - 1} and one new token: shorten the prompt "
                "or raise max_model_len"
            )

    def add(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        stream: TextStream,
        prompt_index: int = 0,
        index: int = 0,
    ) -> Sequence:
        """Queue one continuation of a prompt (see `check_prompt`)."""
        self.check_prompt(prompt_token_ids)
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
        )
        self._next_id += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[Sequence]:
        """Schedule, run, settle. Returns the sequences that computed something."""
        if not self.has_work:
            return []
        try:
            step = self.scheduler.schedule()
            self._settle(step, *self.runner.run(step))
        except BaseException:  # also Ctrl-C: the donated cache may be gone, and with it everything
            self._reset()
            raise
        return [sequence for sequence, _ in step]

    def _settle(
        self,
        step: list[Scheduled],
        tokens: np.ndarray,
        logprobs: TopLogprobs | None,
        prompt_logprobs: TopLogprobs | None,
    ) -> None:
        """Give every sequence of a step what was computed for it."""
        start = 0
        for row, (sequence, count) in enumerate(step):
            if prompt_logprobs is not None and sequence.params.prompt_logprobs is not None:
                wanted = min(count, sequence.num_prompt - 1 - sequence.num_settled)
                first = sequence.num_settled + 1
                for offset in range(wanted):
                    sequence.prompt_logprobs.append(
                        self._report(
                            prompt_logprobs,
                            start + offset,
                            sequence.tokens[first + offset],
                            sequence.params.prompt_logprobs,
                        )
                    )
            start += count
            if step[row].samples and logprobs is not None and sequence.params.logprobs is not None:
                report = self._report(logprobs, row, int(tokens[row]), sequence.params.logprobs)
                sequence.logprobs.append(report)
        samples = [each.samples for each in step]
        self.scheduler.settle(step)
        for row, (sequence, _) in enumerate(step):
            if samples[row]:
                sequence.add_token(int(tokens[row]))
            if sequence.finish_reason is not None:
                self.scheduler.finish(sequence)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Drop sequences, waiting or running, and free their pages. Finished ones stay."""
        for sequence in sequences:
            self.scheduler.finish(sequence)

    def _reset(self) -> None:
        """Drop everything and start with an empty cache."""
        self.scheduler.waiting.clear()
        self.scheduler.running.clear()
        self.runner.reset()
        self.scheduler.allocator = self.runner.allocator

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
    hybrid_kv_cache: bool,
    backend: str | None,
) -> CachePlan:
    """The cache plan of an engine; see `Engine` for the arguments, `dtype` is the activations'.

    Needs no weights, so that options are refused before they are loaded: ValueError, TypeError,
    UnsupportedAttentionError.
    """
    check_positive_int("max_num_seqs", max_num_seqs)
    check_positive_int("max_num_batched_tokens", max_num_batched_tokens)
    check_positive_int("max_model_len", max_model_len)
    if not isinstance(hybrid_kv_cache, bool):
        raise TypeError(f"{hybrid_kv_cache=}: expected True or False")
    if max_model_len < 2:
        raise ValueError(f"{max_model_len=}: a prompt token and a new token need at least 2")
    if max_model_len > config.max_position:
        raise ValueError(f"{max_model_len=}: the model's positions end at {config.max_position}")
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"{max_num_batched_tokens=} is less than {max_num_seqs=}: a step must hold one "
            "token of every sequence"
        )
    specs = layer_specs(config, page_size=page_size, kv_dtype=kv_dtype)
    plan = group_layers(specs, hybrid=hybrid_kv_cache, max_len=max_model_len)
    widths = [
        table_width(plan, group, max_len=max_model_len, step_tokens=max_num_batched_tokens)
        for group in range(len(plan.groups))
    ]
    for layer in plan.layers:
        need = Need(
            target=Target.current(),
            sliding_window=layer.mask.sliding_window,
            soft_cap=layer.mask.soft_cap,
            sinks=layer.mask.sinks,
            image_rule="none",  # the engine passes no spans
            causal=layer.mask.causal,
            num_q_heads=layer.num_q_heads,
            num_kv_heads=layer.store.num_kv_heads,
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
    return plan


def token_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """The token counts that steps are compiled for: 1, 2, powers of 4 from 8, and both limits."""
    sizes = [1, 2, *(8 * 4**exponent for exponent in range(16)), max_num_seqs]
    return tuple(
        sorted({size for size in sizes if size < max_num_batched_tokens} | {max_num_batched_tokens})
    )
