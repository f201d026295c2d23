"""The whole vocabulary in another library: merges by rank against SentencePiece's scores."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from jaxattn.models.gemma3.gguf import GGUFFile
from jaxattn.models.gemma3.packaged import packaged_gguf
from jaxattn.models.gemma3.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The real tokenizer from its GGUF file, and from a tokenizer.json with the same pieces."""
    metadata = GGUFFile(packaged_gguf()).metadata
    pieces = metadata["tokenizer.ggml.tokens"]
    scores = metadata["tokenizer.ggml.scores"].tolist()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    merges = sorted(
        (-score, vocabulary[piece[:cut]], vocabulary[piece[cut:]])
        for piece, score, kind in zip(pieces, scores, types, strict=True)
        if kind == NORMAL
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    )
    pairs = [(pieces[left], pieces[right]) for _, left, right in merges]
    library = HuggingFaceTokenizer(
        models.BPE(vocabulary, pairs, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    library.normalizer = normalizers.Replace(" ", "\u2581")
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    for wanted, add in ((CONTROL, library.add_special_tokens), (USER_DEFINED, library.add_tokens)):
        add(
            [
                AddedToken(piece, normalized=False, special=wanted == CONTROL)
                for piece, kind in zip(pieces, types, strict=True)
                if kind == wanted
            ]
        )
    folder = tmp_path_factory.mktemp("folder")
    library.save(str(folder / "tokenizer.json"))
    return load_tokenizer(packaged_gguf()), load_tokenizer(folder)


def agree(both, text: str) -> None:
    ours, theirs = both
    for parse_special in (True, False):
        ids = ours.encode(text, parse_special=parse_special)
        assert ids == theirs.encode(text, parse_special=parse_special)
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("name", ["LICENSE", "jaxattn/attention.py", "pyproject.toml"])
def test_files(both, name):
    agree(both, (ROOT / name).read_text())


# Scripts, combining marks, emoji, private use; and what the vocabulary has as one token.
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
LATIN = st.text("etaoin shrdlu.,\n\t'-0123456789ABC_<>/", max_size=80)
PIECES = st.sampled_from([" " * 35, "\n" * 33, "\t" * 5, "<b>", "</td>", "<bos>", "<end_of_turn>"])


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ANY | LATIN | PIECES, max_size=6).map("".join))
def test_any_text(both, text):
    agree(both, text)
