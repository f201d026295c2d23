"""Hugging Face transformers on the mixed requests, for `benchmarks.engine --transformers`.

Runs in an environment of its own that has torch, transformers and gguf, and knows nothing of
jaxattn. Prints one line of JSON: the seconds of every setting.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.workload import Request, mixed

ORDERS = {
    "as they come": lambda request: 0,
    "by prompt": lambda request: len(request.prompt),
    "by new tokens": lambda request: request.new,
}


def generate(model: torch.nn.Module, requests: list[Request], batch: int, order: str) -> float:
    """Seconds of all requests in batches, padded on the left, each until its longest is done."""
    requests = sorted(requests, key=ORDERS[order])
    start = time.perf_counter()
    for first in range(0, len(requests), batch):
        part = requests[first : first + batch]
        width = max(len(each.prompt) for each in part)
        ids = torch.zeros(len(part), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(part):
            ids[row, width - len(each.prompt) :] = torch.tensor(each.prompt)
            mask[row, width - len(each.prompt) :] = 1
        new = max(each.new for each in part)
        config = GenerationConfig(
            do_sample=False, max_new_tokens=new, min_new_tokens=new, eos_token_id=1, pad_token_id=0
        )
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, generation_config=config)
        if out.shape != (len(part), width + new):
            raise RuntimeError(f"{out.shape=}: expected {len(part)} rows of {width + new}")
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=0)
    parser.add_argument("--settings", nargs="+", required=True, help="such as '16, by prompt'")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    sys.stdout, stdout = sys.stderr, sys.stdout  # progress bars and the like
    model = AutoModelForCausalLM.from_pretrained(
        options.gguf.parent, gguf_file=options.gguf.name, dtype=getattr(torch, options.dtype)
    ).eval()
    generate(model, [Request([2] * 16, 2)] * 2, 2, "as they come")  # warms up
    requests = mixed(options.repeat, options.count)
    seconds = {}
    for setting in options.settings:
        batch, order = setting.split(", ")
        seconds[setting] = generate(model, requests, int(batch), order)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(json.dumps({"versions": versions, "seconds": seconds}), file=stdout)


if __name__ == "__main__":
    main()
