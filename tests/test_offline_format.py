"""Lines of OpenAI's batch format."""

import json
from pathlib import Path

import pytest

from jaxattn.serve.offline.format import (
    ERROR_BEGINS,
    RESULT_BEGINS,
    Failure,
    Result,
    check_request,
    custom_id_in,
    decode_line,
    encode_line,
    index_ids,
    line_of_result,
)
from jaxattn.serve.openai.errors import RequestError
from tests.offline_cases import request

GOOD = request("a", "the hen")


def test_a_good_line():
    raw = b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n"  # as some editors write it
    found = check_request(decode_line(raw))
    assert (found.custom_id, found.url, found.body) == ("a", GOOD["url"], GOOD["body"])
    assert custom_id_in(raw) == "a"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{not json", "the line is not JSON: Expecting property name enclosed in double quotes"),
        (b'{"a": 1} {', "the line is not JSON: Extra data, column 10"),
        (b'{"a": NaN}', "the line is not JSON: NaN is not JSON"),
        (b'{"a": "\xff"}', "the line is not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "the line is not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "the line is not JSON: Exceeds the limit"),
        (b"[1, 2]", r"the line is JSON, but \[1, 2\] is no object"),
        (b"null", "the line is JSON, but None is no object"),
    ],
)
def test_a_line_that_is_no_object(raw, message):
    with pytest.raises(RequestError, match=message) as error:
        decode_line(raw)
    assert error.value.status == 400
    assert custom_id_in(raw) is None


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_a_key_that_is_missing(name):
    record = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(RequestError, match=f"{name} is missing") as error:
        check_request(record)
    assert error.value.param == name


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"custom_id": 5}, "custom_id", "custom_id=5: expected a string, not empty"),
        ({"custom_id": ""}, "custom_id", "custom_id='': expected a string, not empty"),
        ({"method": "GET"}, "method", "method='GET': expected 'POST'"),
        ({"url": None}, "url", "url=None: expected a string"),
        ({"body": "{}"}, "body", "body='{}': expected an object"),
        ({"priority": 1}, "priority", "unknown key 'priority': a line has custom_id, method, url"),
    ],
)
def test_a_key_that_is_wrong(change, param, message):
    with pytest.raises(RequestError, match=message) as error:
        check_request(GOOD | change)
    assert error.value.param == param


def test_ids_are_indexed():
    lines = [(1, "a"), (2, None), (4, "b"), (5, None)]
    assert index_ids(lines, "line {}".format) == {"a": 1, "b": 4}


def test_an_id_that_is_there_twice():
    with pytest.raises(ValueError, match="custom_id 'b' is on line 2 and on line 7"):
        index_ids([(1, "a"), (2, "b"), (7, "b")], "line {}".format)


@pytest.mark.parametrize(
    ("custom_id", "message"),
    [
        (None, "^there is not a result: the output is left as it is"),
        ("c", "^there is the result of 'c', which is not in in.jsonl: .* another input"),
        ("b", "^there is the second result of 'b': remove one of them"),
    ],
)
def test_results_that_do_not_fit_the_input(custom_id, message):
    index = {"a": 1, "b": 2}
    place = dict(where="there", input=Path("in.jsonl"))
    assert line_of_result("a", index, {2}, **place) == 1
    with pytest.raises(ValueError, match=message):
        line_of_result(custom_id, index, {2}, **place)


@pytest.mark.parametrize("custom_id", ["a", "é日本", '"\n\\', "half \ud800 a pair", "\u2028"])
def test_records_come_back_from_one_line(custom_id):
    result = Result(3, custom_id, "abc", {"choices": [custom_id]})
    failure = Failure(3, custom_id, {"message": custom_id})
    for outcome, begins in ((result, RESULT_BEGINS), (failure, ERROR_BEGINS)):
        line = encode_line(outcome.record())
        assert line.startswith(begins)
        assert line.endswith(b"\n") and line.count(b"\n") == 1
        assert json.loads(line) == outcome.record()
        assert custom_id_in(line) == custom_id


def test_text_stays_readable():
    assert "日本".encode() in encode_line(Result(1, "日本", "abc", {}).record())


def test_the_record_of_a_result():
    assert Result(3, "a", "abc", {"choices": []}).record() == {
        "id": "batch_req_abc",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "abc", "body": {"choices": []}},
        "error": None,
    }
