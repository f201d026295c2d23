"""`LLM`: a Gemma 3 checkpoint that turns prompts into text, offline."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from os import PathLike
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxattn.engine.devices import (
    free_memory,
    make_mesh,
    use_compilation_cache,
    weight_placer,
)
from jaxattn.engine.engine import Engine, plan_engine
from jaxattn.engine.images import public_ids
from jaxattn.engine.outputs import RequestOutput, StreamChunk
from jaxattn.engine.prompts import EncodedPrompt, PromptEncoder
from jaxattn.engine.sequence import Sequence as Continuation
from jaxattn.models.gemma3.checkpoint import (
    check_quantization,
    load_config,
    resolve_model,
    stream_weights,
)
from jaxattn.models.gemma3.model import Gemma3
from jaxattn.models.gemma3.sharding import shared_config
from jaxattn.models.gemma3.tokenizer import Tokenizer, load_tokenizer
from jaxattn.registry import Backend
from jaxattn.sampling import SamplingParams
from jaxattn.spec import check_positive_int

Prompt = str | dict[str, Any]
Request = tuple[EncodedPrompt, SamplingParams]
ModelDtype = Literal["float32", "bfloat16"]
_DEFAULT_MAX_MODEL_LEN = 8192


class LLM:
    """A model, its tokenizer and an engine.

        llm = LLM("gemma-3-270m")
        for out in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(out.outputs[0].text)

    Args:
        model: a known name ("gemma-3-270m"), a GGUF file, a Hugging Face folder, or one that
            `jaxattn convert` wrote.
        dtype: of weights and activations.
        quantize: "int8" keeps the weights of matrices in 8 bits, with a scale for each row; None
            keeps them in `dtype`, or as a checkpoint that is quantised has them.
        kv_dtype: stored type of keys and values; None is `dtype`.
        page_size: tokens of a cache page.
        max_model_len: most tokens of a sequence, prompt included; None: the model's limit, at
            most 8192.
        max_num_seqs: most sequences that run at a time; more prompts wait.
        max_num_batched_tokens: most tokens of a step; longer prompts are computed in chunks.
        memory: bytes of the KV cache on each device. None: 9 tenths of what the device has left
            once the weights are there; on CPU what `max_num_seqs` sequences of `max_model_len`
            need. Where sequences need more, some wait or are computed again.
        expected_len: tokens of a typical sequence, to divide `memory` well; None: a quarter of
            `max_model_len`.
        hybrid_kv_cache: False stores windowed layers like global ones; outputs are the same.
        prefix_reuse: False computes every prompt whole; outputs are the same.
        images: False leaves the vision tower out, and its memory, where the checkpoint has one.
        pan_and_scan: show an image that is far from square in crops too, each as an image of its
            own.
        allow_remote_images: fetch images whose http(s) URL is given; others may so have this
            machine ask its neighbours.
        backend: attention backend; None is the first that supports the model here.
        tensor_parallel: devices that share the heads of one replica; a multiple of the kv heads
            stores each of them on several. The query heads bound it: 4 for 270M and 1B.
        data_parallel: replicas, each with its own cache and `max_num_seqs` sequences. The first
            `tensor_parallel * data_parallel` devices that JAX sees are used.
        seed: of requests that state none.
        compilation_cache: a folder in which compiled steps are kept for later processes, by JAX's
            persistent cache; None: JAX's own setting, or where that has none, ~/.cache/jaxattn.
        progress: show progress bars (on standard error).
    """

    def __init__(
        self,
        model: str | PathLike[str] = "gemma-3-270m",
        *,
        dtype: ModelDtype = "bfloat16",
        quantize: Literal["int8"] | None = None,
        kv_dtype: str | None = None,
        page_size: int = 32,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        memory: int | None = None,
        expected_len: int | None = None,
        hybrid_kv_cache: bool = True,
        prefix_reuse: bool = True,
        images: bool = True,
        pan_and_scan: bool = False,
        allow_remote_images: bool = False,
        backend: str | Backend | None = None,
        tensor_parallel: int = 1,
        data_parallel: int = 1,
        seed: int = 0,
        compilation_cache: str | PathLike[str] | None = None,
        progress: bool = True,
    ):
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(
                f"{dtype=}: use 'bfloat16' or 'float32' (Gemma 3 activations exceed float16's "
                "largest number, 65504)"
            )
        check_quantization(quantize)
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
            raise ValueError(f"{seed=}: expected an int of at least 0 and at most {2**32 - 1}")
        if memory is not None:
            check_positive_int("memory", memory)
        mesh = make_mesh(tensor_parallel=tensor_parallel, data_parallel=data_parallel)
        self.name = str(model)
        path = resolve_model(self.name)
        for name, value in (
            ("images", images),
            ("pan_and_scan", pan_and_scan),
            ("allow_remote_images", allow_remote_images),
        ):
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r}: expected True or False")
        config = load_config(str(path), images=images)
        if max_model_len is None:
            max_model_len = min(config.max_position, _DEFAULT_MAX_MODEL_LEN)
        options: dict[str, Any] = {
            "kv_dtype": dtype if kv_dtype is None else kv_dtype,
            "page_size": page_size,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "memory": None if memory is None else memory * tensor_parallel,
            "expected_len": expected_len,
            "hybrid_kv_cache": hybrid_kv_cache,
            "prefix_reuse": prefix_reuse,
            "backend": backend,
        }
        # Refuses before the weights are loaded.
        plan_engine(config, dtype=dtype, tensor_parallel=tensor_parallel, **options)
        use_compilation_cache(compilation_cache)
        self.tokenizer: Tokenizer = load_tokenizer(path)
        self.prompts = PromptEncoder(
            self.tokenizer,
            config,
            max_model_len=max_model_len,
            pan_and_scan=pan_and_scan,
            allow_remote_images=allow_remote_images,
        )
        self._progress = progress
        with self._bar() as bar:
            task = bar.add_task("loading", total=None, speed="")
            config, weights = stream_weights(
                path,
                dtype=dtype,
                quantize=quantize,
                images=images,
                place=weight_placer(config, mesh),
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        if options["memory"] is None:
            options["memory"] = free_memory(mesh)
        self.engine = Engine(
            Gemma3(shared_config(config, tensor_parallel), weights, dtype),
            eos_ids=self.tokenizer.eos_ids,
            token_text=self.tokenizer.token,
            mesh=mesh,
            **options,
        )
        self._next_seed = seed
        self._in_use = threading.Lock()

    def precompile(self) -> None:
        """Compile every shape of a step now, with a progress bar, not when it first comes."""
        with self._bar() as bar:
            task = bar.add_task("compiling", total=self.engine.runner.num_shapes, speed="")
            self.engine.precompile(lambda done: bar.update(task, completed=done))

    def next_seed(self) -> int:
        """The seed of the next request that states none."""
        seed = self._next_seed
        self._next_seed = (seed + 1) % 2**32
        return seed

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; the outputs come in the order of the prompts.

        A prompt is a string, `{"prompt_token_ids": [...]}`, or `{"prompt": "...", "images":
        [...]}` with a `<start_of_image>` in the text for each image: a path, bytes of a file, a
        data: URL, a PIL image or an array. `params`: for all prompts, or one for each. Everything
        is checked before anything is computed (ValueError, TypeError).
        """
        return self._complete(self._requests(prompts, params, self._encode))

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: `[{"role": "user", "content": "..."}]`.

        A content may be a list of parts, images among them, see `render_chat`.
        Needs an instruction-tuned checkpoint to make sense; a base model continues the text.
        """
        conversations: Any = messages
        if messages and isinstance(messages[0], dict):
            conversations = [messages]
        return self._complete(
            self._requests(conversations, params, lambda _, each: self.prompts.chat(each))
        )

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[StreamChunk]:
        """New text as it comes, for all prompts at once. Closing the iterator frees the cache."""
        requests = self._requests(prompts, params, self._encode)

        def chunks() -> Generator[StreamChunk]:
            yield from self._run(requests, [])

        return chunks()

    def _requests(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None,
        encode: Callable[[int, Any], EncodedPrompt],
    ) -> list[Request]:
        """Tokens and parameters of every prompt, all checked. `encode(number, prompt)`."""
        if isinstance(prompts, str | dict):
            prompts = [prompts]
        if not isinstance(prompts, Sequence):
            raise TypeError(f"prompts={prompts!r}: expected a prompt or a list of prompts")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not isinstance(params, Sequence):
            raise TypeError(f"{params=}: expected SamplingParams or a list of them")
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} sampling params for {len(prompts)} prompts")
        requests = []
        for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            if not isinstance(each, SamplingParams):
                raise TypeError(f"prompt {number}: expected SamplingParams, got {each!r}")
            encoded = encode(number, prompt)
            try:
                self.engine.check_prompt(encoded.token_ids, encoded.images)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from None
            requests.append((encoded, each))
        return requests

    def _encode(self, number: int, prompt: Prompt) -> EncodedPrompt:
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if isinstance(prompt, dict) and set(prompt) in ({"prompt"}, {"prompt", "images"}):
            return self._encode_text(number, **prompt)
        if not isinstance(prompt, dict) or set(prompt) != {"prompt_token_ids"}:
            raise TypeError(
                f"prompt {number}: expected a string or a dict with just 'prompt_token_ids', or "
                f"'prompt' and 'images', got {prompt!r}"
            )
        ids = prompt["prompt_token_ids"]
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            raise TypeError(f"prompt {number}: prompt_token_ids is a list of ints, got {ids!r}")
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise TypeError(f"prompt {number}: prompt_token_ids are ints, got {ids[:8]}")
        return EncodedPrompt(None, list(ids))

    def _encode_text(
        self, number: int, prompt: str, images: Sequence[Any] | None = None
    ) -> EncodedPrompt:
        if not isinstance(prompt, str):
            raise TypeError(f"prompt {number}: 'prompt' is a string, got {prompt!r}")
        if not prompt:
            raise ValueError(f"prompt {number} is empty: give some text")
        if images is not None and not isinstance(images, list | tuple):
            raise TypeError(f"prompt {number}: 'images' is a list of images")
        try:
            return self.prompts.encode(prompt, images)
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None

    def _add(
        self,
        requests: list[Request],
        continuations: list[Continuation],
    ) -> None:
        for number, (prompt, params) in enumerate(requests):
            seed = self.next_seed() if params.seed is None else params.seed
            for index in range(params.n):
                continuations.append(
                    self.engine.add(
                        prompt.token_ids,
                        params,
                        seed=seed,
                        stream=self.tokenizer.stream(),
                        images=prompt.images,
                        prompt_index=number,
                        index=index,
                    )
                )

    def _run(
        self,
        requests: list[Request],
        continuations: list[Continuation],
    ) -> Generator[StreamChunk]:
        """Queue the requests into `continuations`, step until all are done, yield what is new."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("a stream of this LLM is still open: exhaust it or close it first")
        held = True

        def leave() -> None:
            nonlocal held
            if held:
                held = False
                try:
                    self.engine.clear()
                finally:
                    self._in_use.release()

        try:
            self.engine.clear()  # what an interrupted clean-up has left
            self._add(requests, continuations)
            left = len(continuations)
            while left and self.engine.has_work:
                chunks = []
                for sequence in self.engine.step():
                    if sequence.error is not None:
                        raise sequence.error
                    left -= sequence.finish_reason is not None
                    chunks.append(_chunk(sequence))
                if not left:
                    leave()  # before the last chunks: who reads no further locks nobody out
                yield from chunks
        finally:
            leave()

    def _complete(self, requests: list[Request]) -> list[RequestOutput]:
        continuations: list[Continuation] = []
        total = sum(params.n for _, params in requests)
        with self._bar() as bar, closing(self._run(requests, continuations)) as chunks:
            task = bar.add_task("generating", total=total, speed="")
            tokens = 0
            for chunk in chunks:
                tokens += len(chunk.token_ids)
                elapsed = bar.tasks[0].elapsed or 0.0
                speed = f"{tokens / elapsed:.1f} tokens/s" if elapsed else ""
                done = chunk.finish_reason is not None
                bar.update(task, advance=int(done), speed=speed)
        outputs: list[list[Continuation]] = [[] for _ in requests]
        for each in continuations:
            outputs[each.prompt_index].append(each)
        return [
            _request_output(prompt.text, public_ids(prompt.token_ids, self.engine.vocab_size), done)
            for (prompt, _), done in zip(requests, outputs, strict=True)
        ]

    def _bar(self) -> Progress:
        """A progress bar on standard error; tasks have a field `speed`."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[speed]}"),
        )
        return Progress(*columns, console=Console(stderr=True), disable=not self._progress)


def _chunk(sequence: Continuation) -> StreamChunk:
    return StreamChunk(
        prompt_index=sequence.prompt_index,
        index=sequence.index,
        text=sequence.take_text(),
        token_ids=tuple(sequence.take_tokens()),
        finish_reason=sequence.finish_reason,
    )


def _request_output(
    text: str | None, ids: list[int], continuations: list[Continuation]
) -> RequestOutput:
    first = continuations[0]
    prompt_logprobs = None
    if first.params.prompt_logprobs is not None:
        prompt_logprobs = (None, *first.prompt_logprobs)
    return RequestOutput(
        prompt=text,
        prompt_token_ids=tuple(ids),
        outputs=tuple(each.output() for each in continuations),
        prompt_logprobs=prompt_logprobs,
    )
