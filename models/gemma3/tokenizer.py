"""Text to token ids and back, exactly, from a GGUF file's vocabulary or a `tokenizer.json`."""

import codecs
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import Tokenizer as HuggingFaceTokenizer

from jaxattn.models.gemma3.errors import CheckpointError
from jaxattn.models.gemma3.gguf import GGUFFile

BOS = 2
END_OF_TURN = 106
EOS_IDS = (1, END_OF_TURN)  # not 107, which is a newline in Gemma 3
_KNOWN = {1: "<eos>", BOS: "<bos>", END_OF_TURN: "<end_of_turn>"}
_JSON, _MODEL = "tokenizer.json", "tokenizer.model"
_SPACE = "\u2581"  # stands for a space inside pieces
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types in GGUF and SentencePiece alike
_BPE = 2  # SentencePiece's TrainerSpec.ModelType
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_MAYBE_CONTROL = re.compile(r"<[^<>\s]+>")  # quicker than an alternation of 6,249 tokens


class Tokenizer:
    """Gemma 3's tokenizer. Made by `load_tokenizer`.

    `pieces[id]` is the text of a token as the vocabulary has it; `control` are the ids that mark
    turns, images and the like, and have no text of their own.
    """

    bos_id = BOS
    eos_ids = EOS_IDS

    def __init__(
        self,
        pieces: Sequence[str],
        control: frozenset[int],
        encode_plain: Callable[[str], list[int]],
    ):
        self._pieces = pieces
        self._control = control
        self._control_ids = {pieces[token]: token for token in control}
        others = [piece for piece in self._control_ids if not _MAYBE_CONTROL.fullmatch(piece)]
        others.sort(key=len, reverse=True)
        self._maybe_control = re.compile(
            "|".join([*map(re.escape, others), _MAYBE_CONTROL.pattern])
        )
        self._encode_plain = encode_plain
        self.vocab_size = len(pieces)

    def encode(self, text: str, *, bos: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        `bos`: begin with <bos>, once, also if the text already does. `parse_special`: control
        tokens written in the text, such as <start_of_turn>, become their ids; False takes them as
        plain characters, which is what text from a stranger needs.

        Raises ValueError for a text that UTF-8 cannot hold (half of a surrogate pair).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has half a surrogate pair, {text[error.start]!r}, at {error.start}"
            ) from None
        ids: list[int] = []
        start = 0
        if parse_special:
            for match in self._maybe_control.finditer(text):
                token = self._control_ids.get(match.group())
                if token is not None:
                    ids += [*self._plain(text[start : match.start()]), token]
                    start = match.end()
        ids += self._plain(text[start:])
        return [self.bos_id, *ids] if bos and ids[:1] != [self.bos_id] else ids

    def _plain(self, text: str) -> list[int]:
        return self._encode_plain(text) if text else []

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Control tokens have no text, unless `skip_special` is False.
        """
        stream = TextStream(self, skip_special=skip_special)
        return "".join(map(stream.step, ids)) + stream.finish()

    def stream(self) -> "TextStream":
        """A decoder that takes one token at a time."""
        return TextStream(self, skip_special=True)

    def token(self, token_id: int) -> str:
        """The text of one token on its own, control tokens included."""
        return self.decode([token_id], skip_special=False)

    def token_bytes(self, token_id: int, *, skip_special: bool) -> bytes:
        """The bytes that a token stands for."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"{token_id=}: the vocabulary has ids 0 to {self.vocab_size - 1}")
        piece = self._pieces[token_id]
        if token_id in self._control:
            return b"" if skip_special else piece.encode()
        byte = _BYTE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()


class TextStream:
    """Decodes token by token; half a character is held back until the rest of it comes."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str:
        """The text that this token completes."""
        data = self._tokenizer.token_bytes(token_id, skip_special=self._skip_special)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left of an unfinished character."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a GGUF file, or of a folder with `tokenizer.json` or `tokenizer.model`.

    Raises CheckpointError if it is missing, damaged, or not Gemma 3's.
    """
    path = Path(path)
    if not path.is_dir():
        tokenizer = _from_proto(path, _proto_of_metadata(path, GGUFFile(path).metadata))
    elif (path / _MODEL).is_file() and not (path / _JSON).is_file():
        path = path / _MODEL
        tokenizer = _from_proto(path, path.read_bytes())
    else:
        path = path / _JSON
        tokenizer = _from_json(path)
    for token, piece in _KNOWN.items():
        found = tokenizer.token(token) if token < tokenizer.vocab_size else None
        if found != piece:
            raise CheckpointError(
                f"{path} is not Gemma 3's tokenizer: token {token} is {found!r}, expected {piece!r}"
            )
    return tokenizer


def tokenizer_file(path: str | os.PathLike[str]) -> tuple[str, bytes]:
    """Name and content of the one file from which a folder has the tokenizer of this checkpoint.

    A GGUF file's vocabulary becomes a SentencePiece model. Raises as `load_tokenizer`.
    """
    load_tokenizer(path)
    path = Path(path)
    if not path.is_dir():
        return _MODEL, _proto_of_metadata(path, GGUFFile(path).metadata)
    name = _JSON if (path / _JSON).is_file() else _MODEL
    return name, (path / name).read_bytes()


def _proto_of_metadata(path: Path, metadata: dict[str, Any]) -> bytes:
    """A SentencePiece model of the file's vocabulary: the file has scores and no merges.

    User-defined tokens (runs of spaces, newlines, HTML tags) are matched first, longest first.
    """
    prefix = "tokenizer.ggml"
    model = metadata.get(f"{prefix}.model")
    if model != "llama":
        raise CheckpointError(f"{path}: {prefix}.model is {model!r}, expected 'llama'")
    names = ("tokens", "scores", "token_type")
    absent = [name for name in names if f"{prefix}.{name}" not in metadata]
    if absent:
        raise CheckpointError(f"{path}: the metadata lack {prefix}.{absent[0]}")
    pieces, scores, types = (metadata[f"{prefix}.{name}"] for name in names)
    if list(map(type, (pieces, scores, types))) != [list, np.ndarray, np.ndarray]:
        raise CheckpointError(f"{path}: {prefix}.{', '.join(names)} are not three arrays")
    if not len(pieces) == len(scores) == len(types):
        raise CheckpointError(f"{path}: {len(pieces)=}, {len(scores)=} and {len(types)=} differ")
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.trainer_spec.model_type = _BPE
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.pad_id, proto.trainer_spec.eos_id = 0, 1
    proto.trainer_spec.bos_id, proto.trainer_spec.unk_id = BOS, 3
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    try:
        for piece, score, kind in zip(pieces, scores.tolist(), types.tolist(), strict=True):
            inside = piece.replace(" ", _SPACE) if kind == _USER_DEFINED else piece
            proto.pieces.add(piece=inside, score=score, type=kind)
        return proto.SerializeToString()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the vocabulary is damaged ({error})") from error


def _from_proto(path: Path, serialized: bytes) -> Tokenizer:
    """SentencePiece itself."""
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    processor = SentencePieceProcessor()
    try:
        proto.ParseFromString(serialized)
        processor.LoadFromSerializedProto(serialized)
    except (DecodeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: the vocabulary is damaged ({error})") from error
    control = frozenset(
        token for token, piece in enumerate(proto.pieces) if piece.type in (_UNKNOWN, _CONTROL)
    )
    return Tokenizer([piece.piece for piece in proto.pieces], control, processor.encode)


def _from_json(path: Path) -> Tokenizer:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: a folder needs its tokenizer.json")
    try:
        library = HuggingFaceTokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} is damaged: {error}") from error
    library.encode_special_tokens = True  # `Tokenizer.encode` finds control tokens itself
    pieces = [library.id_to_token(token) or "" for token in range(library.get_vocab_size())]
    control = frozenset(
        token for token, added in library.get_added_tokens_decoder().items() if added.special
    )
    return Tokenizer(
        pieces, control, lambda text: library.encode(text, add_special_tokens=False).ids
    )
