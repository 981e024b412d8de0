"""What a line of a batch's input says, and what is wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from keyhole.batch.files import URLS, BatchLine, Shard, lines_of, read_request, requests_of
from keyhole.errors import ConfigError

GOOD = {"custom_id": "a", "method": "POST", "url": URLS[0], "body": {"messages": []}}


def line(value: Any, number: int = 7) -> BatchLine:
    return BatchLine(number, value if isinstance(value, bytes) else json.dumps(value).encode())


def test_a_good_line_is_its_request() -> None:
    found = read_request(line(GOOD))
    assert (found.problem, found.custom_id) == (None, "a")
    assert (found.url, found.body) == (URLS[0], {"messages": []})


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        (b"{", "invalid_json", "not JSON"),
        (b"\xff\xfe", "invalid_json", "not JSON"),
        (b"[" * 100_000, "invalid_json", "not JSON"),
        ([1], "invalid_json", "[1] must be a JSON object"),
        (GOOD | {"custom_id": ""}, "missing_custom_id", 'custom_id "" must be a string'),
        (GOOD | {"custom_id": 3}, "missing_custom_id", "custom_id 3 must be a string"),
        (GOOD | {"method": "GET"}, "invalid_request", 'method "GET" must be "POST"'),
        (GOOD | {"url": "/v1/embeddings"}, "invalid_request", "must be /v1/chat/completions or"),
        (GOOD | {"url": ["/v1"]}, "invalid_request", "url"),
        (GOOD | {"body": "x" * 200}, "invalid_request", "xxx... must be a JSON object"),
        (GOOD | {"body": {"stream": True}}, "invalid_request", "no streams"),
    ],
)
def test_a_bad_line_is_an_error_with_advice(given: Any, code: str, says: str) -> None:
    found = read_request(line(given)).problem
    assert found is not None
    assert found[0] == code
    assert found[1].startswith("line 7: ")
    assert says in found[1]


def test_the_second_line_with_a_custom_id_is_a_mistake() -> None:
    lines = [line(GOOD, 1), line(GOOD | {"custom_id": "b"}, 2), line(GOOD, 4)]
    found = [request.problem for request in requests_of(lines)]
    assert found[:2] == [None, None]
    assert found[2] == ("duplicate_custom_id", "line 4: custom_id 'a' was already used in line 1")


def test_blank_lines_are_no_requests() -> None:
    assert [one.number for one in lines_of([b"\n", b"{}\n", b" \r\n", b"{}"])] == [2, 4]


def test_an_id_follows_from_number_and_content() -> None:
    ids = {line(GOOD, 1).id, line(GOOD, 2).id, line(GOOD | {"body": {}}, 1).id}
    assert len(ids) == 3
    assert line(GOOD, 1).id == line(GOOD, 1).id


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_line_is_in_one_shard(count: int) -> None:
    shards = [Shard.parse(f"{index}/{count}") for index in range(1, count + 1)]
    for number in range(1, 20):
        assert sum(shard.has(BatchLine(number, b"")) for shard in shards) == 1


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b", "1/0", "-1/2", "1/2/3", "1 /2"])
def test_a_shard_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be i/n with i from 1 to n, such as 2/8"):
        Shard.parse(text)
