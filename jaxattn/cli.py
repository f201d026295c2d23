"""`jaxattn generate | batch | serve | convert | plan | support`: the library from a terminal."""

import argparse
import os
import sys
import time
from collections.abc import Sequence

import jax
from rich.console import Console

import jaxattn
from jaxattn import convert
from jaxattn.engine.ahead import CompilerError, check_libtpu
from jaxattn.options import add_quantize, memory_size
from jaxattn.serve.http import command as serve_command
from jaxattn.serve.offline import command as offline_command

DEFAULT_MODEL = "gemma-3-270m"
_USER_ERRORS = (
    *(OSError, ValueError, TypeError, NotImplementedError, ImportError),
    *(MemoryError, jax.errors.JaxRuntimeError),  # a cache that does not fit
    CompilerError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, 1 for an error, 2 for usage, 130 for Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, e.g. `head`, has gone: let the last flush go nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _USER_ERRORS as error:
        lines = (line.strip() for line in str(error).splitlines())
        print(f"jaxattn: error: {' '.join(lines)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxattn", description="Gemma 3 on paged attention with a window per layer."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    generate = commands.add_parser("generate", help="continue a prompt")
    generate.set_defaults(run=_generate)
    generate.add_argument(
        "prompt", nargs="?", help="text; default: standard input, less a newline at its end"
    )
    _add_model(generate)
    generate.add_argument(
        "--chat",
        action="store_true",
        help="send the prompt as a user's turn; needs an instruction-tuned checkpoint",
    )
    generate.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="show it with the prompt: before the text of the turn with --chat, else where the "
        "prompt has <start_of_image>; may be repeated",
    )
    generate.add_argument("--max-tokens", type=int, default=64, help="new tokens (64)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-k", type=int, default=0, help="0 keeps every token")
    generate.add_argument("--top-p", type=float, default=1.0, help="1 keeps every token")
    generate.add_argument("--min-p", type=float, default=0.0, help="0 keeps every token")
    generate.add_argument(
        "--seed", type=int, default=0, help="of the draws, if --temperature is not 0"
    )
    generate.add_argument("--stop", action="append", help="end at this text; may be repeated")
    generate.add_argument("--repetition-penalty", type=float, default=1.0, help="1 is none")
    generate.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    generate.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights"
    )
    add_quantize(generate)
    generate.add_argument("--max-model-len", type=int, help="most tokens, prompt included")
    generate.add_argument("--backend", help="attention backend, see `jaxattn support`")

    offline_command.add_parser(commands)
    serve_command.add_parser(commands)
    convert.add_parser(commands)

    plan = commands.add_parser(
        "plan", help="print a model's cache plan, or what an engine is on a TPU that is not here"
    )
    plan.set_defaults(run=_plan)
    _add_model(plan)
    plan.add_argument("--max-len", type=int, default=8192, help="tokens of a sequence")
    plan.add_argument("--batch", type=int, default=8, help="sequences in flight")
    plan.add_argument("--page-size", type=int, default=32, help="tokens of a page (32)")
    plan.add_argument("--kv-dtype", default="bfloat16", help="stored type (bfloat16)")
    plan.add_argument(
        "--memory", type=memory_size, help="of the cache, such as 4GiB: print what it holds"
    )
    plan.add_argument(
        "--expected-len",
        type=int,
        help="tokens of a typical sequence, for which --memory is divided (a quarter of --max-len)",
    )

    target = plan.add_argument_group(
        "on a TPU slice", "compiles the engine's steps for it, without a TPU; needs libtpu"
    )
    target.add_argument(
        "--target", help="such as v5e-8; --batch are then the sequences of each replica"
    )
    target.add_argument("--dtype", choices=("bfloat16", "float32"), help="of weights (bfloat16)")
    add_quantize(target)
    target.add_argument(
        "--no-images", action="store_true", default=None, help="leave the vision tower out"
    )
    target.add_argument("--prefill-tokens", type=int, help="most tokens of a step (512)")
    target.add_argument(
        "--tensor-parallel",
        type=int,
        help="devices of a replica; default: the fewest whose cache holds --batch sequences of "
        "--max-len, else the most that can share the model",
    )
    target.add_argument("--data-parallel", type=int, help="replicas; default: all that there are")

    support = commands.add_parser("support", help="print what each attention backend supports")
    support.set_defaults(run=_support)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a known name, a GGUF file, a Hugging Face folder or what `jaxattn convert` wrote "
        "(default: %(default)s)",
    )


def _generate(options: argparse.Namespace) -> int:
    from jaxattn.engine.llm import LLM
    from jaxattn.models.gemma3.chat import render_chat

    prompt = options.prompt
    if prompt is None:
        if sys.stdin.isatty():
            raise ValueError("no prompt: give it as an argument or on standard input")
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise ValueError("the prompt is empty: give some text")
    params = jaxattn.SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        stop=options.stop,
        repetition_penalty=options.repetition_penalty,
        ignore_eos=options.ignore_eos,
    )
    if options.chat and options.model == DEFAULT_MODEL:
        print(
            f"jaxattn: note: {DEFAULT_MODEL} is the base model, not tuned to answer; give an "
            "instruction-tuned checkpoint by --model",
            file=sys.stderr,
        )
    start = time.perf_counter()
    for file in options.image:
        if not os.path.isfile(file):
            raise FileNotFoundError(f"--image {file}: there is no such file")
    llm = LLM(
        options.model,
        dtype=options.dtype,
        quantize=options.quantize,
        max_model_len=options.max_model_len,
        max_num_seqs=1,
        backend=options.backend,
    )
    loaded = time.perf_counter() - start
    request = prompt
    if options.chat:
        parts: list[dict[str, str]] = [{"type": "image", "image": file} for file in options.image]
        parts.append({"type": "text", "text": prompt})
        request = render_chat([{"role": "user", "content": parts}])
    images = {"images": options.image} if options.image else {}
    chunks = llm.stream({"prompt": request, **images}, params)
    console = Console(stderr=True)
    start, times, text = time.perf_counter(), list[float](), "" if options.chat else prompt
    # The first two tokens each wait for a step to be compiled: prefill, then decode.
    with console.status("preparing (steps are compiled once, and kept for the next run)"):
        for chunk in chunks:
            text += chunk.text
            times += [time.perf_counter()] * len(chunk.token_ids)
            if len(times) >= 2:
                break
    print(text, end="", flush=True)
    for chunk in chunks:
        print(chunk.text, end="", flush=True)
        times += [time.perf_counter()] * len(chunk.token_ids)
    print(flush=True)
    decoding = len(times) - 2
    speed = f", {decoding / (times[-1] - times[1]):.1f} tokens/s" if decoding > 0 else ""
    console.print(
        f"[dim]loaded in {loaded:.1f} s; first token after {times[0] - start:.1f} s (compiling "
        f"included); {len(times)} tokens{speed}[/dim]",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _plan(options: argparse.Namespace) -> int:
    if options.target is not None:
        return _plan_target(options)
    for_target = (
        "dtype",
        "quantize",
        "no_images",
        "prefill_tokens",
        "tensor_parallel",
        "data_parallel",
    )
    given = [name for name in for_target if getattr(options, name) is not None]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{flags}: only with --target")
    from jaxattn.cache.sizing import capacity, cdiv, pool_pages, worst_demand
    from jaxattn.models.gemma3.checkpoint import load_config
    from jaxattn.models.gemma3.model import layer_specs

    config = load_config(options.model)
    specs = layer_specs(config, page_size=options.page_size, kv_dtype=options.kv_dtype)
    console = Console(width=None if sys.stdout.isatty() else 100)
    max_len, step_tokens = options.max_len, 512
    typical_len = options.expected_len or cdiv(max_len, 4)
    for hybrid in (True, False):
        plan = jaxattn.group_layers(specs, hybrid=hybrid, max_len=max_len)
        pages = worst_demand(
            plan, max_num_seqs=options.batch, max_len=max_len, step_tokens=step_tokens
        )
        state = "on" if hybrid else "off"
        console.rule(f"{options.model}, hybrid cache {state}", align="left")
        console.print(plan)
        total = sum(count * plan.page_bytes(group) for group, count in enumerate(pages))
        console.print(
            f"{options.batch} sequences of {max_len} tokens, {step_tokens} in flight: "
            f"{total / 2**20:,.1f} MiB"
        )
        if options.memory is not None:
            pools = pool_pages(
                plan,
                options.memory,
                max_len=max_len,
                typical_len=typical_len,
                step_tokens=step_tokens,
            )
            lengths = sorted({max(1, max_len // part) for part in (16, 4, 1)})
            held = ", ".join(
                f"{capacity(plan, pools, length=each, step_tokens=step_tokens):,} of {each:,}"
                for each in lengths
            )
            console.print(
                f"{options.memory / 2**20:,.1f} MiB, divided for sequences of {typical_len:,} "
                f"tokens, hold at a time: {held}"
            )
        console.print()
    return 0


def _plan_target(options: argparse.Namespace) -> int:
    from jaxattn.engine.target_plan import Wanted, plan_target
    from jaxattn.engine.target_report import report

    if options.memory is not None or options.expected_len is not None:
        raise ValueError("--memory and --expected-len: with --target the memory is the chip's")
    wanted = Wanted(
        model=options.model,
        max_len=options.max_len,
        batch=options.batch,
        page_size=options.page_size,
        kv_dtype=options.kv_dtype,
        dtype=options.dtype or Wanted.dtype,
        quantize=options.quantize,
        images=not options.no_images,
        prefill_tokens=Wanted.prefill_tokens
        if options.prefill_tokens is None
        else options.prefill_tokens,
    )
    plan = plan_target(
        wanted,
        options.target,
        tensor_parallel=options.tensor_parallel,
        data_parallel=options.data_parallel,
    )
    check_libtpu()
    waiting = f"compiling {options.model} for {options.target}, which takes minutes"
    with Console(stderr=True).status(waiting):
        steps = plan.compile()
    Console(width=None if sys.stdout.isatty() else 100).print(report(plan, steps))
    return 0


def _support(options: argparse.Namespace) -> int:
    print(jaxattn.support_table(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
