"""A whole file of requests by an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keyhole import LLM, SamplingParams
from keyhole.batch.files import BatchOutput, Shard
from keyhole.batch.run import BatchOutcome, run_batch
from keyhole.errors import ConfigError
from tests.checkpoints import make_model

GREEDY = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = make_model("llama", tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300)
    return LLM(path, memory="8MiB", max_batch=4)


def request(name: str, prompt: Any = "hello", **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, **GREEDY, **more}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, *requests: Any) -> Path:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in requests))
    return path


def read(path: Path) -> dict[str, Any]:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    found = {one["custom_id"]: one for one in entries}
    assert len(found) == len(entries)
    return found


def never() -> LLM:
    raise AssertionError("the model is not needed")


def test_answers_are_those_of_the_engine(llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    chat = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions"}
    chat["body"] = {"messages": messages, **GREEDY}
    source = write(tmp_path / "in.jsonl", chat, *(request(f"{i}", f"text {i}") for i in range(9)))
    done = run_batch(source, tmp_path / "out.jsonl", lambda: llm)
    assert done == BatchOutcome(lines=10, answered=10, kept=0, failed=0)
    params, found = SamplingParams(**GREEDY), read(tmp_path / "out.jsonl")
    for i in range(9):
        choice = found[f"{i}"]["response"]["body"]["choices"][0]
        assert choice["text"] == llm.generate(f"text {i}", params).text
    message = found["chat"]["response"]["body"]["choices"][0]["message"]
    assert message["content"] == llm.chat(messages, params).text
    assert found["chat"]["response"]["status_code"] == 200
    assert found["chat"]["error"] is None


def test_what_cannot_be_answered_gets_an_error_and_the_others_an_answer(
    llm: LLM, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    lines = [
        json.dumps(request("good")),
        "no json",
        json.dumps(request("other", model="gpt-5")),
        json.dumps(request("cold", temperature=-1)),
        json.dumps(request("long", "x" * 5000)),
        json.dumps(request("good")),
    ]
    source.write_text("\n".join(lines))
    done = run_batch(source, tmp_path / "out.jsonl", lambda: llm)
    assert done == BatchOutcome(lines=6, answered=6, kept=0, failed=5)
    entries = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    said = {}
    for one in entries:
        error = one["error"] or one["response"]["body"].get("error")
        key = one["custom_id"], one["response"] and one["response"]["status_code"]
        said[key] = None if error is None else error["message"]
    assert said.pop(("good", 200)) is None
    assert said.pop(("other", 404)).startswith("model 'gpt-5' is not served here")
    assert "temperature" in said.pop(("cold", 400))
    assert "tokens" in said.pop(("long", 400))
    assert said.pop((None, None)).startswith("line 2: not JSON")
    assert said.pop(("good", None)) == "line 6: custom_id 'good' was already used in line 1"
    assert not said


class StoppedError(Exception):
    """Where a run was killed."""


def stopping(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    add: Callable[..., None] = BatchOutput.add

    def one_more(self: BatchOutput, entry: Any) -> None:
        if len(self.statuses) == after:
            raise StoppedError
        add(self, entry)

    monkeypatch.setattr(BatchOutput, "add", one_more)


def test_a_run_that_is_ended_goes_on_where_it_was(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", *(request(f"{i}", f"text {i}") for i in range(20)))
    output = tmp_path / "out.jsonl"
    for after in (5, 13):
        with monkeypatch.context() as patch:
            stopping(after, patch)
            with pytest.raises(StoppedError):
                run_batch(source, output, lambda: llm)
        with output.open("ab") as file:
            file.write(b'{"id": "batch_req_0')  # the line that was being written
    done = run_batch(source, output, lambda: llm)
    assert done == BatchOutcome(lines=20, answered=7, kept=13, failed=0)
    assert set(read(output)) == {f"{i}" for i in range(20)}
    before = output.read_bytes()
    assert run_batch(source, output, never).kept == 20
    assert output.read_bytes() == before


def test_shards_answer_every_line_once(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(request(f"{i}") for i in range(7)))
    names: list[str] = []
    for index in (1, 2, 3):
        output = tmp_path / f"out-{index}.jsonl"
        run_batch(source, output, lambda: llm, shard=Shard(index, 3))
        names += read(output)
    assert sorted(names) == [f"{i}" for i in range(7)]


def test_one_output_may_take_one_shard_after_another(llm: LLM, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(request(f"{i}") for i in range(5)))
    for index in (1, 2):
        run_batch(source, tmp_path / "out.jsonl", lambda: llm, shard=Shard(index, 2))
    assert len(read(tmp_path / "out.jsonl")) == 5


def test_an_output_with_answers_to_another_input_is_refused(llm: LLM, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    run_batch(write(tmp_path / "one.jsonl", request("a")), output, lambda: llm)
    other = write(tmp_path / "other.jsonl", request("a", "another text"))
    with pytest.raises(ConfigError, match=r"has 1 answers to requests .* not in .*other\.jsonl'"):
        run_batch(other, output, never)


def test_files_that_cannot_be_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", request("a"))
    with pytest.raises(ConfigError, match="input and output are the same file"):
        run_batch(source, source, never)
    with pytest.raises(ConfigError, match=r"none\.jsonl' cannot be read: No such file"):
        run_batch(tmp_path / "none.jsonl", tmp_path / "out.jsonl", never)
    with pytest.raises(ConfigError, match="must be a regular file, because it is read twice"):
        run_batch(tmp_path, tmp_path / "out.jsonl", never)
    assert not (tmp_path / "out.jsonl").exists()


def test_an_empty_input_needs_no_model(tmp_path: Path) -> None:
    done = run_batch(write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", never)
    assert done == BatchOutcome(lines=0, answered=0, kept=0, failed=0)
    assert (tmp_path / "out.jsonl").read_bytes() == b""
