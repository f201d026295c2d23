"""When a continuation ends, and what of its text may be shown before."""

import pytest

from jaxattn.engine.sequence import Sequence
from jaxattn.models.gemma3.tokenizer import EOS_IDS, Tokenizer
from jaxattn.sampling import SamplingParams
from tests.tiny_model import PlainText, vocabulary


def byte_stream():
    """A real decoder on the tiny vocabulary."""
    pieces, _, types = vocabulary()
    control = frozenset(token for token, kind in enumerate(types) if kind == 3)
    return Tokenizer(pieces, control, lambda text: []).stream()


def token_of(piece):
    return vocabulary()[0].index(piece)


def sequence(prompt=(5, 6), *, max_len=100, stream=None, **asked):
    return Sequence(
        0,
        list(prompt),
        SamplingParams(**{"max_tokens": 100} | asked),
        prompt_index=0,
        index=0,
        seed=0,
        max_len=max_len,
        eos_ids=EOS_IDS,
        stream=stream or PlainText(),
    )


def feed(each, text):
    """Add a token for every character until the sequence ends; the chunks shown on the way."""
    chunks = []
    for character in text:
        each.add_token(ord(character))
        chunks.append(each.take_text())
        if each.finish_reason is not None:
            break
    return chunks


def test_a_stop_string_over_several_tokens():
    each = sequence(stop="END")
    chunks = feed(each, "abENEND, never seen")
    assert chunks == ["a", "b", "", "", "EN", "", ""]
    assert (each.output().text, each.finish_reason, each.stop_reason) == ("abEN", "stop", "END")
    assert each.output().token_ids == tuple(map(ord, "abENEND"))


def test_text_is_held_back_and_released():
    each = sequence(stop=["aab", "xyz!"])
    chunks = feed(each, "aaaacxyzaab")
    assert chunks == ["", "", "a", "a", "aac", "", "", "", "xyz", "", ""]
    assert "".join(chunks) == each.output().text == "aaaacxyz"


def test_held_back_text_is_released_at_the_end():
    each = sequence(stop="END", max_tokens=4)
    assert "".join(feed(each, "abEN")) == each.output().text == "abEN"
    assert each.finish_reason == "length"


@pytest.mark.parametrize("stops", [["two", "one"], ["one", "two"]])
def test_the_earlier_match_wins(stops):
    class WholeText(PlainText):
        def step(self, token_id):
            return "say one and two"

    each = sequence(stop=stops, stream=WholeText())
    each.add_token(7)
    assert (each.take_text(), each.stop_reason) == ("say ", "one")


def test_a_stop_string_at_the_first_token():
    each = sequence(stop="a")
    assert feed(each, "abc") == [""]
    assert (each.output().text, each.output().token_ids) == ("", (97,))
    assert (each.finish_reason, each.stop_reason) == ("stop", "a")


def test_a_stop_string_wins_over_the_length():
    each = sequence(stop="c", max_tokens=3)
    feed(each, "abc")
    assert (each.finish_reason, each.output().text) == ("stop", "ab")


def test_a_stop_string_in_the_prompt_does_not_count():
    each = sequence(prompt=map(ord, "a stop"), stop="stop", max_tokens=3)
    feed(each, "xyz")
    assert each.finish_reason == "length"


@pytest.mark.parametrize(("token", "ends"), [(1, True), (106, True), (107, False), (105, False)])
def test_the_models_own_stop_tokens(token, ends):
    each = sequence()
    each.add_token(ord("a"))
    each.add_token(token)
    assert each.finish_reason == ("stop" if ends else None)
    assert each.stop_reason is None
    assert each.output().text == ("a" if ends else "a" + chr(token))
    assert each.output().token_ids == (ord("a"), token)


def test_ignore_eos():
    each = sequence(ignore_eos=True)
    for token in EOS_IDS:
        each.add_token(token)
    assert each.finish_reason is None


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_token_ids(ignore_eos):
    each = sequence(stop_token_ids=[98, 1], ignore_eos=ignore_eos)
    feed(each, "ab")
    assert (each.finish_reason, each.stop_reason) == ("stop", 98)
    assert each.output().text == "a"
    also_eos = sequence(stop_token_ids=[98, 1], ignore_eos=ignore_eos)
    also_eos.add_token(1)
    assert (also_eos.finish_reason, also_eos.stop_reason) == ("stop", 1)


def test_max_tokens():
    each = sequence(max_tokens=3)
    feed(each, "abcdef")
    assert (each.output().text, each.finish_reason, each.stop_reason) == ("abc", "length", None)


def test_max_len_includes_the_prompt():
    each = sequence(prompt=range(5), max_len=8)
    feed(each, "abcdef")
    assert (each.output().text, each.finish_reason) == ("abc", "length")


def test_half_a_character_is_held_back():
    each = sequence(stream=byte_stream())
    shown = []
    for byte in "a\u00e9\u20ac".encode():
        each.add_token(token_of(f"<0x{byte:02X}>"))
        shown.append(each.take_text())
    assert shown == ["a", "", "\u00e9", "", "", "\u20ac"]


@pytest.mark.parametrize("end", ["length", "stop"])
def test_an_unfinished_character_is_flushed(end):
    each = sequence(stream=byte_stream(), max_tokens=3 if end == "length" else 100)
    shown = ""
    for piece in ["<0x61>", "<0xE2>", "<0x82>" if end == "length" else "<eos>"]:
        each.add_token(token_of(piece))
        shown += each.take_text()
    assert shown == each.output().text == "a\ufffd"
    assert each.finish_reason == end


def test_tokens_are_taken_once():
    each = sequence()
    each.add_token(97)
    each.add_token(98)
    assert each.take_tokens() == [97, 98]
    assert each.take_tokens() == []
    each.add_token(99)
    assert each.take_tokens() == [99]
    assert each.new_tokens == [97, 98, 99]


def test_a_stop_string_in_the_last_flushed_characters_is_found():
    class Late(PlainText):
        def finish(self):
            return "STOP!"

    each = sequence(max_tokens=2, stop="STOP", stream=Late())
    each.add_token(97)
    each.add_token(97)
    assert (each.output().text, each.finish_reason, each.stop_reason) == ("aa", "stop", "STOP")
