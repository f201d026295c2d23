"""`jaxattn convert`: any checkpoint to a folder of our own."""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from jaxattn.options import add_quantize

_DESCRIPTION = """
Write a folder with weights (an Orbax checkpoint), config and tokenizer, for --model. It is written
beside TARGET and renamed when it is whole.
"""


def add_parser(commands: Any) -> None:
    """Add the command to what `ArgumentParser.add_subparsers` returned."""
    parser = commands.add_parser(
        "convert", help="write a checkpoint as a folder of our own", description=_DESCRIPTION
    )
    parser.set_defaults(run=_convert)
    parser.add_argument("source", help="a known name, a GGUF file or a folder")
    parser.add_argument("target", type=Path, help="the new folder")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of weights"
    )
    add_quantize(parser)
    parser.add_argument(
        "--force", action="store_true", help="replace a folder that this command wrote"
    )


def _convert(options: argparse.Namespace) -> int:
    from jaxattn.models.gemma3.checkpoint import expanded, load_weights, resolve_model
    from jaxattn.models.gemma3.saved import check_target, save_checkpoint
    from jaxattn.models.gemma3.tokenizer import tokenizer_file

    target = expanded(options.target)
    check_target(target, force=options.force)
    source = resolve_model(options.source)
    tokenizer = tokenizer_file(source)
    console = Console(stderr=True)
    with Progress(console=console) as bar:
        task = bar.add_task("loading", total=None)
        config, weights = load_weights(
            source,
            dtype=options.dtype,
            quantize=options.quantize,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    with console.status(f"writing {target}"):
        save_checkpoint(target, config, weights, tokenizer, force=options.force)
    kept = sum(array.nbytes for array in weights.values())
    print(
        f"{options.source}: {_size(source)}; weights in memory: {kept / 2**20:,.1f} MiB; "
        f"{target}: {_size(target)}",
        file=sys.stderr,
    )
    return 0


def _size(path: Path) -> str:
    """Of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return f"{sum(each.stat().st_size for each in files) / 2**20:,.1f} MiB"
