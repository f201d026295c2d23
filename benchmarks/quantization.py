"""What 8 bits for weights cost and gain: perplexity and decoding of Gemma 3 270M on CPU.

    uv run python -m benchmarks.quantization           # prints the table
    uv run python -m benchmarks.quantization --write   # and keeps it in benchmarks/quantization.md

The text is Python's own help (`pydoc_data.topics`), so that it is the same wherever this Python is.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax.numpy as jnp

from benchmarks.cpu import CONTEXT, DECODE_TOKENS, bandwidth, decode_rate, machine
from benchmarks.tables import markdown_table
from jaxattn import LLM, SamplingParams
from jaxattn.models.gemma3.checkpoint import load_config
from jaxattn.models.gemma3.weights import Quantization, weight_table

MODEL = "gemma-3-270m"
SEQUENCES, LENGTH = 4, 512  # of the text: tokens are scored from a context of up to LENGTH
SAMPLE = 40_000  # first characters of the text
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, activations in bfloat16": {"dtype": "bfloat16", "quantize": "int8"},
}


def perplexity(llm: LLM) -> float:
    """`exp` of the mean negative log probability of `SEQUENCES * (LENGTH - 1)` tokens of text."""
    text = "\n\n".join(topics[name] for name in sorted(topics))[:SAMPLE]
    ids = llm.tokenizer.encode(text, bos=False)
    step = LENGTH - 1
    prompts = [
        {"prompt_token_ids": [llm.tokenizer.bos_id, *ids[start : start + step]]}
        for start in range(0, SEQUENCES * step, step)
    ]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    total = 0.0
    for out in llm.generate(prompts, params):
        for token, scores in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True):
            total += scores[token].logprob
    return math.exp(-total / (SEQUENCES * step))


def weight_bytes(dtype: str, quantize: Quantization | None = None) -> int:
    """Bytes of the weights."""
    table = weight_table(load_config(MODEL), quantize)
    return sum(
        math.prod(each.shape) * jnp.dtype(each.kept(dtype)).itemsize for each in table.values()
    )


def measure(name: str, repeats: int) -> dict[str, float]:
    """One row. Run in a process of its own, which frees its memory."""
    llm = LLM(MODEL, max_model_len=1024, max_num_seqs=8, progress=False, **VARIANTS[name])
    return {
        "MiB": weight_bytes(**VARIANTS[name]) / 2**20,
        "perplexity": perplexity(llm),
        "decode 1": decode_rate(llm, 1, repeats),
        "decode 8": decode_rate(llm, 8, repeats),
    }


def table(repeats: int) -> list[str]:
    """A row for each way of keeping the weights."""
    rows = []
    for name in VARIANTS:
        before = bandwidth()
        command = [sys.executable, "-m", "benchmarks.quantization", "--variant", name]
        command += ["--repeats", str(repeats)]
        row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        numbers = [f"{row['MiB']:.0f}", f"{row['perplexity']:.2f}"]
        rows.append(
            [name, *numbers, f"{row['decode 1']:.1f}", f"{row['decode 8']:.0f}", f"{before:.0f}"]
        )
    header = ["weights", "MiB", "perplexity", "decode, batch 1", "decode, batch 8", "GB/s before"]
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the table in quantization.md")
    parser.add_argument("--variant", choices=VARIANTS, help="measure one row and print it as JSON")
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant, options.repeats)))
        return
    load = os.getloadavg()[0]
    text = "\n".join(
        [
            "# Weights in 8 bits: Gemma 3 270M on CPU",
            "",
            f"Measured {date.today()} by `python -m benchmarks.quantization` on a 2-core AMD EPYC "
            f"virtual machine, shared ({machine()}), load average {load:.1f} before; medians of "
            f"{options.repeats}.",
            "",
            f"Perplexity of {SEQUENCES * (LENGTH - 1):,} tokens in sequences of {LENGTH}, <bos> "
            "included, of the help topics that come with Python "
            f"{platform.python_version()}. Tokens/s of decoding from a context of {CONTEXT} to "
            f"{CONTEXT + DECODE_TOKENS} tokens, through `LLM.generate`. Every row is from the same "
            "Q4_K_M file, so float32 here is what that file holds, not what was trained.",
            "",
            *table(options.repeats),
            "",
        ]
    )
    print(text)
    if options.write:
        (Path(__file__).parent / "quantization.md").write_text(text)


if __name__ == "__main__":
    main()
