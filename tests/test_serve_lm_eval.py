"""lm-eval's `local-completions` on a task of ours: its log-likelihoods are the library's own.

`uv tool install "lm-eval[api]" --with transformers` puts its command on the path, apart from the
project's own packages.
"""

import json
import os
import shutil
import subprocess

import pytest
from tokenizers import AddedToken as Added
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from jaxattn import SamplingParams
from tests import tiny_model
from tests.live_server import MODEL, live_server, make_llm

COMMAND = shutil.which("lm_eval")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMMAND is None, reason="lm_eval is not installed: see this file's top"),
]
DOCUMENTS = [
    {"question": "the hen is in", "choices": [" a pan", " the pen", " there"], "answer": 1},
    {"question": "on and on", "choices": [" the air", " an inn"], "answer": 0},
    {"question": "he the re", "choices": [" on", " \u20ac", " therein on a pen"], "answer": 2},
]
CHOICES = """
task: tiny_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
TEXT = """
task: tiny_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
GENERATION = """
task: tiny_generation
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
generation_kwargs: {{until: ["t", "\\n\\n"], max_gen_toks: 12}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lm_eval")


@pytest.fixture(scope="module")
def llm(folder):
    return make_llm(tiny_model.write_gguf(folder / "tiny.gguf"))


@pytest.fixture(scope="module")
def tokenizer(folder, llm):
    """The folder of the same tokenizer for Hugging Face's library."""
    library = fast_tokenizer()
    for document in DOCUMENTS:
        for text in (document["question"], *document["choices"]):
            assert library.encode(text).ids == llm.tokenizer.encode(text)
    path = folder / "tokenizer"
    path.mkdir()
    library.save(str(path / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>"}
    (path / "tokenizer_config.json").write_text(json.dumps(kind | {"eos_token": "<eos>"}))
    return path


def fast_tokenizer() -> Tokenizer:
    """BPE: a piece can be merged from any two others, in the order of the scores."""
    pieces, scores, types = tiny_model.vocabulary()
    ids = {piece: token for token, piece in enumerate(pieces)}
    merged = sorted((piece for piece in pieces if len(piece) > 1), key=lambda p: -scores[ids[p]])
    merges = [
        (piece[:cut], piece[cut:])
        for piece in merged
        if types[ids[piece]] == 1
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    ]
    library = Tokenizer(models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Replace(" ", "\u2581")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence(parts)
    control = [piece for piece, kind in zip(pieces, types, strict=True) if kind == 3]
    library.add_special_tokens([Added(piece) for piece in control])
    library.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])]
    )
    return library


@pytest.fixture(scope="module")
def expected(llm):
    """By prompt log-probabilities: of each choice, and of each whole question."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)

    def score(ids: list[int], start: int) -> tuple[float, bool]:
        (out,) = llm.generate({"prompt_token_ids": ids}, params)
        reports = [out.prompt_logprobs[place][ids[place]] for place in range(start, len(ids))]
        return sum(each.logprob for each in reports), all(each.rank == 1 for each in reports)

    def score_text(context: str, text: str) -> tuple[float, bool]:
        return score(llm.tokenizer.encode(context + text), len(llm.tokenizer.encode(context)))

    def score_whole(text: str) -> float:
        """lm-eval puts its own <bos> before that of add_bos_token."""
        return score([llm.tokenizer.bos_id, *llm.tokenizer.encode(text)], 1)[0]

    greedy = SamplingParams(max_tokens=12, temperature=0, stop=["t", "\n\n"])
    return {
        "tiny_choices": [
            [score_text(each["question"], choice) for choice in each["choices"]]
            for each in DOCUMENTS
        ],
        "tiny_text": [score_whole(each["question"]) for each in DOCUMENTS],
        "tiny_generation": [
            out.outputs[0].text for out in llm.generate([d["question"] for d in DOCUMENTS], greedy)
        ],
    }


@pytest.mark.parametrize("tokenized", [True, False])
def test_log_likelihoods_are_the_librarys(llm, expected, tokenizer, folder, tmp_path, tokenized):
    file = folder / "documents.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
    for task in (CHOICES, TEXT, GENERATION):
        name = task.split()[1]
        (tmp_path / f"{name}.yaml").write_text(task.format(file=file))
    with live_server(llm) as live:
        options = {
            "model": MODEL,
            "base_url": f"{live.url}/v1/completions",
            "tokenizer": tokenizer,
            "tokenized_requests": tokenized,
            "add_bos_token": True,
            "num_concurrent": 2,
            "max_length": 64,
        }
        arguments = ",".join(f"{name}={value}" for name, value in options.items())
        command = [COMMAND, "run", "--model", "local-completions", "--model_args", arguments]
        command += ["--tasks", *expected, "--include_path", str(tmp_path), "--log_samples"]
        command += ["--output_path", str(tmp_path / "out")]
        home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=os.environ | home
        )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: samples(tmp_path / "out", name) for name in expected}
    for ours, theirs in zip(expected["tiny_choices"], found["tiny_choices"], strict=True):
        assert len(ours) == len(theirs)
        for (logprob, greedy), [(text, is_greedy)] in zip(ours, theirs, strict=True):
            assert float(text) == pytest.approx(logprob, abs=1e-4)
            assert is_greedy == str(greedy)
    rolling = [float(each[0][0]) for each in found["tiny_text"]]
    assert rolling == pytest.approx(expected["tiny_text"], abs=1e-4)
    assert [each[0][0] for each in found["tiny_generation"]] == expected["tiny_generation"]


def samples(folder, task):
    """The responses that lm-eval logged for a task, by document."""
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [each["resps"] for each in sorted(lines, key=lambda each: each["doc_id"])]
