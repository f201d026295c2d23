"""Token ids as literals, and text that comes back whole: from GGUF and from tokenizer.json."""

import json
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from jaxattn.models.gemma3.errors import CheckpointError
from jaxattn.models.gemma3.packaged import packaged_gguf
from jaxattn.models.gemma3.tokenizer import BOS, EOS_IDS, Tokenizer, load_tokenizer

DATA = Path(__file__).parent / "data" / "gemma3_270m"
SPACE = "\u2581"


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return load_tokenizer(packaged_gguf())


GOLDEN = [
    ("", []),
    ("Hello world", [9259, 1902]),
    ("Once upon a time", [14946, 3324, 496, 990]),
    (" leading", [5830]),
    ("trailing ", [136697, 236743]),
    (" " * 31, [167]),
    (" " * 35, [167, 140]),  # 31 + 4: the longest first
    ("a" + " " * 35 + "b", [236746, 167, 140, 236763]),
    ("\n\n\n", [109]),
    ("\t\t", [255969]),
    ("\r\n", [251, 107]),
    ("<h1>Hi</h1>", [184, 10979, 191]),
    ("<table><tr><td>x</td></tr></table>", [168, 173, 175, 236781, 183, 181, 176]),
    ("\u4f60\u597d\uff0c\u4e16\u754c", [144626, 236900, 12811]),
    ("Hello \U0001f600", [9259, 163543]),
    ("\U0001f9ff\U000e0100", [248979, 481, 398, 370, 366]),  # the second as four bytes
    ("e\u0301", [236744, 238288]),  # not composed
    ("\uff21\uff22", [239549, 241577]),  # full width stays
    ("\x00a", [238, 236746]),
]


@pytest.mark.parametrize(("text", "ids"), GOLDEN)
def test_golden_ids(real, text, ids):
    assert real.encode(text) == [2, *ids]
    assert real.encode(text, bos=False) == ids
    assert real.decode(ids) == text
    assert real.decode([2, *ids]) == text
    assert real.decode([2, *ids], skip_special=False) == "<bos>" + text


@pytest.mark.parametrize("length", range(1, 70))
def test_runs_of_spaces_take_the_longest_first(real, length):
    ids = real.encode(" " * length, bos=False)
    assert [len(real.token(token)) for token in ids] == [
        *[31] * (length // 31),
        *([length % 31] if length % 31 else []),
    ]


TURN = "<start_of_turn>user\nHi<end_of_turn>\n"


def test_control_tokens_in_the_text(real):
    ids = [105, 2364, 107, 10979, 106, 107]
    assert real.encode(TURN) == [2, *ids]
    assert real.decode(ids) == "user\nHi\n"
    assert real.decode(ids, skip_special=False) == TURN
    plain = real.encode(TURN, parse_special=False)
    assert not {105, 106} & set(plain)
    assert real.decode(plain) == TURN


def test_bos_exactly_once(real):
    assert real.encode("<bos>hi") == real.encode("hi") == [2, 2202]
    assert real.encode("<bos>hi", bos=False) == [2, 2202]
    assert real.encode("hi", bos=False) == [2202]
    stranger = real.encode("<bos>hi", parse_special=False)
    assert stranger == [2, 236820, 46757, 236813, 2202]
    assert real.encode("<bos>") == [2]


def test_what_stops_a_text(real):
    assert real.bos_id == BOS == 2
    assert real.eos_ids == EOS_IDS == (1, 106)
    assert [real.token(token) for token in (0, 1, 2, 3)] == ["<pad>", "<eos>", "<bos>", "<unk>"]
    assert [real.token(token) for token in (106, 107)] == ["<end_of_turn>", "\n"]


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=SPACE), max_size=60)
SPECIAL = st.sampled_from(["<bos>", "<start_of_turn>", "<", ">", "<<", "<unused3>", "  ", "\n\n"])


@settings(max_examples=200, deadline=None)
@given(TEXTS | st.lists(TEXTS | SPECIAL, max_size=6).map("".join))
@example("<<start_of_turn>>")
def test_any_text_comes_back(real, text):
    plain = real.encode(text, bos=False, parse_special=False)
    assert real.decode(plain) == text
    parsed = real.encode(text, bos=False)
    assert real.decode(parsed, skip_special=False) == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 262_143) | st.integers(238, 493), max_size=30))
def test_a_stream_says_what_decode_says(real, ids):
    """Also of half characters: 238 to 493 are the bytes."""
    stream = real.stream()
    steps = [stream.step(token) for token in ids]
    assert "".join(steps) + stream.finish() == real.decode(ids)


def test_half_a_character_is_held_back(real):
    ids = [238 + byte for byte in "\u00e9\U0001f600".encode()]
    assert [real.token(238 + byte) for byte in (0x41, 0x0A)] == ["A", "\n"]
    stream = real.stream()
    assert [stream.step(token) for token in ids] == ["", "\u00e9", "", "", "", "\U0001f600"]
    assert stream.finish() == ""
    stream = real.stream()
    assert [stream.step(ids[0]), stream.finish()] == ["", "\ufffd"]
    assert real.decode([*ids[:1], 9259]) == "\ufffdHello"


def test_every_token_decodes(real):
    assert real.vocab_size == 262_144
    everything = range(real.vocab_size)
    shown = [real.token_bytes(token, skip_special=False) for token in everything]
    assert all(shown)
    assert not any(SPACE.encode() in piece for piece in shown)
    hidden = [token for token in everything if not real.token_bytes(token, skip_special=True)]
    assert len(hidden) == 6249
    assert {0, 1, 2, 3, 105, 106} < set(hidden)


@pytest.mark.parametrize("token", [-1, 262_144])
def test_ids_outside_the_vocabulary(real, token):
    with pytest.raises(ValueError, match=f"token_id={token}: the vocabulary has ids 0 to 262143"):
        real.decode([token])


def test_half_a_surrogate_pair_is_refused(real):
    with pytest.raises(ValueError, match=r"half a surrogate pair, '\\ud800', at 1"):
        real.encode("a\ud800")


@pytest.mark.parametrize("prompt", ["short8", "mid48", "gpl2000"])
def test_prompts_of_the_reference(real, prompt):
    """Not apache600, whose ids are from a tokenizer that takes 35 spaces as 16 + 19."""
    ids = np.load(DATA / f"{prompt}.npz")["input_ids"].tolist()
    assert real.encode(real.decode(ids)) == ids


def test_the_fourth_prompt_differs_in_a_run_of_spaces_only(real):
    ids = np.load(DATA / "apache600.npz")["input_ids"].tolist()
    ours = real.encode(real.decode(ids))
    assert real.decode(ours) == real.decode(ids)
    changed = {real.token(token) for token in set(ours) ^ set(ids)}
    assert all(piece.strip() == "" for piece in changed)


# tokenizer.json


def json_library(**changes) -> HuggingFaceTokenizer:
    """BPE with byte fallback and Gemma's normaliser: "the" and " the" are merged."""
    fixed = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>"}
    fixed |= {105: "<start_of_turn>", 106: "<end_of_turn>", 107: "\n"} | changes.get("fixed", {})
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + [SPACE, *"abcdefghijklmnopqrstuvwxyz<>_"]
    pieces += ["th", "the", f"{SPACE}the"]
    rest = iter(pieces)
    vocabulary = {}
    for token in range(len(fixed) + len(pieces)):
        vocabulary[fixed[token] if token in fixed else next(rest)] = token
    merges = [("t", "h"), ("th", "e"), (SPACE, "the")]
    model = models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    library = HuggingFaceTokenizer(model)
    library.normalizer = normalizers.Replace(" ", SPACE)
    library.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = [fixed[token] for token in (0, 1, 2, 3, 105, 106)]
    library.add_special_tokens([AddedToken(each, special=True) for each in special])
    library.add_tokens([AddedToken("\n", normalized=False)])
    return library


@pytest.fixture(scope="module")
def library() -> HuggingFaceTokenizer:
    return json_library()


@pytest.fixture(scope="module")
def from_json(library, tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("folder")
    library.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    "text", ["", "the the", "  the", "a\n\nb", "\u00e9", "<start_of_turn>the<end_of_turn>\n", "<b>"]
)
def test_tokenizer_json(from_json, library, text):
    ids = library.encode(text, add_special_tokens=False).ids
    assert from_json.encode(text) == [2, *ids]
    assert from_json.decode([2, *ids]) == library.decode(ids)
    assert from_json.decode(ids, skip_special=False) == text
    plain = from_json.encode(text, bos=False, parse_special=False)
    assert from_json.decode(plain) == text
    assert not {105, 106} & set(plain)


def test_tokenizer_json_literals(from_json, library):
    the = library.token_to_id(f"{SPACE}the")
    assert from_json.encode(" the<end_of_turn>\n") == [2, the, 106, 107]
    assert from_json.vocab_size == library.get_vocab_size()


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_any_text_comes_back_from_tokenizer_json(from_json, text):
    assert from_json.decode(from_json.encode(text, parse_special=False)) == text


@pytest.mark.parametrize("text", ["", "{", "{}", '{"model": 3}', "\x00"])
def test_damaged_tokenizer_json(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        load_tokenizer(tmp_path)


def test_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_another_model(tmp_path):
    json_library(fixed={106: "<eot>"}).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="token 106 is '<eot>', expected '<end_of_turn>'"):
        load_tokenizer(tmp_path)


def test_fewer_tokens_than_the_control_tokens_need(tmp_path):
    library = HuggingFaceTokenizer(models.BPE({"a": 0, "<eos>": 1, "<bos>": 2}, []))
    library.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())
    with pytest.raises(CheckpointError, match="token 106 is None"):
        load_tokenizer(tmp_path)
