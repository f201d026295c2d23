"""The flags that `jaxattn batch` and `jaxattn serve` share: what an engine is made of."""

import argparse
import re
from typing import Any

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `LLM`'s keywords; `engine_options` reads them."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model",
        default="gemma-3-270m",
        help="a known name, a GGUF file, a Hugging Face folder or what `jaxattn convert` wrote "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights"
    )
    add_quantize(group)
    group.add_argument("--kv-dtype", help="stored type of keys and values (that of the weights)")
    group.add_argument("--page-size", type=int, default=32, help="tokens of a cache page (32)")
    group.add_argument("--max-model-len", type=int, help="most tokens, prompt included")
    group.add_argument("--max-num-seqs", type=int, default=32, help="sequences in flight (32)")
    group.add_argument(
        "--max-num-batched-tokens", type=int, default=512, help="tokens of a step (512)"
    )
    group.add_argument(
        "--memory",
        type=memory_size,
        help="of the KV cache on each device, such as 2GiB; default: what the device has left, or "
        "on CPU what --max-num-seqs sequences of --max-model-len need",
    )
    group.add_argument(
        "--expected-len",
        type=int,
        help="tokens of a typical sequence: the memory is divided among the cache's groups for as "
        "many of these as possible (a quarter of --max-model-len)",
    )
    group.add_argument(
        "--no-hybrid-kv-cache",
        dest="hybrid_kv_cache",
        action="store_false",
        help="store windowed layers like global ones; outputs are the same",
    )
    group.add_argument(
        "--no-prefix-reuse",
        dest="prefix_reuse",
        action="store_false",
        help="compute every prompt whole; outputs are the same",
    )
    group.add_argument(
        "--no-images",
        dest="images",
        action="store_false",
        help="leave the vision tower out, where the checkpoint has one",
    )
    group.add_argument(
        "--pan-and-scan",
        action="store_true",
        help="show an image that is far from square in crops too",
    )
    group.add_argument(
        "--allow-remote-images",
        action="store_true",
        help="fetch images by http(s) URLs of requests; they may so reach what this machine can",
    )
    group.add_argument("--backend", help="attention backend, see `jaxattn support`")
    group.add_argument(
        "--tensor-parallel", type=int, default=1, help="devices that share the kv heads (1)"
    )
    group.add_argument(
        "--data-parallel", type=int, default=1, help="devices that share the requests (1)"
    )
    group.add_argument("--seed", type=int, default=0, help="of requests that state none")


def add_quantize(parser: Any) -> None:
    """Add the flag that quantises weights to a parser or a group."""
    parser.add_argument(
        "--quantize", choices=("int8",), help="8 bits for weights, with a scale for each row"
    )


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `LLM`."""
    names = (
        *("model", "dtype", "quantize", "kv_dtype", "page_size", "max_model_len", "max_num_seqs"),
        *("max_num_batched_tokens", "memory", "expected_len", "hybrid_kv_cache", "prefix_reuse"),
        *("images", "pan_and_scan", "allow_remote_images"),
        *("backend", "tensor_parallel", "data_parallel", "seed"),
    )
    return {name: getattr(options, name) for name in names}


def memory_size(text: str) -> int:
    """Bytes of a size such as "2GiB", "500M" or "1073741824"; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 2GiB or 500MiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
