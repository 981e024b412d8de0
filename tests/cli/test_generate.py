"""`keyhole generate`: text on stdout, counters on stderr, or one JSON object."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from tqdm import tqdm

from keyhole import LLM, Delta, Result, SamplingParams, Stats
from tests.checkpoints import make_model
from tests.cli.conftest import Run

PROMPT = "The quick brown fox jumps over the lazy dog, again and again and again."
OPTIONS = ("--max-tokens", "8", "--ignore-eos", "--device", "cpu")


def expected(path: str) -> str:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    return LLM(path, device="cpu").generate(PROMPT, params).text


def test_text_goes_to_stdout_and_one_line_of_counters_to_stderr(path: str, run: Run) -> None:
    ran = run("generate", PROMPT, "--model", path, *OPTIONS)
    assert ran.status == 0
    assert ran.out == expected(path) + "\n"
    assert ran.err.count("\n") == 1
    for part in ("8 tokens |", "tokens/s", "100.0 % of keys read", "KiB read per token", "first"):
        assert part in ran.err


def test_one_token_is_counted_as_one(path: str, run: Run) -> None:
    """It was "1 tokens"."""
    ran = run("generate", PROMPT, "--model", path, "--max-tokens", "1", "--device", "cpu")
    assert ran.err.startswith("1 token |")


@pytest.mark.slow
def test_a_prompt_comes_from_an_argument_a_file_or_a_pipe(
    path: str, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    text = expected(path) + "\n"
    assert run("generate", "--file", str(file), "--model", path, *OPTIONS).out == text
    assert run("generate", "--model", path, *OPTIONS, stdin=PROMPT).out == text
    assert run("generate", "-", "--model", path, *OPTIONS, stdin=PROMPT).out == text


def test_a_byte_order_mark_is_no_part_of_a_prompt(path: str, run: Run, tmp_path: Path) -> None:
    """Other answers were given, without a word."""
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8-sig")
    text = expected(path) + "\n"
    assert run("generate", "--file", str(file), "--model", path, *OPTIONS).out == text
    assert run("generate", "--model", path, *OPTIONS, stdin=file.read_bytes()).out == text


@pytest.mark.parametrize("command", ["generate", "chat", "documents ask --documents x"])
def test_input_that_is_not_text_is_refused(path: str, run: Run, command: str) -> None:
    """It was a traceback."""
    ran = run(*command.split(), "--model", path, "--device", "cpu", stdin=b"caf\xe9 keeps")
    assert (ran.status, ran.out) == (2, "")
    assert "stdin is not text in utf-8: 'utf-8' codec can't decode byte 0xe9" in ran.err


def test_a_prompt_may_be_token_ids(path: str, run: Run, tmp_path: Path) -> None:
    """A model without a tokenizer could not be used from the command line."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    options = ("--prompt-ids", "9, 8,70", *OPTIONS)
    text = LLM(path, device="cpu").generate([9, 8, 70], params).text
    assert run("generate", "--model", path, *options).out == text + "\n"
    bare = make_model("llama", tmp_path)
    ids = LLM(bare, device="cpu").generate([9, 8, 70], params).token_ids
    ran = run("generate", "--model", bare, *options)
    assert ran.status == 0
    assert ran.out == ",".join(map(str, ids)) + "\n"
    assert "give token ids, {'prompt_token_ids': [...]} or --prompt-ids" in (
        run("generate", PROMPT, "--model", bare, *OPTIONS).err
    )


def test_json_is_one_object_with_python_names(path: str, run: Run) -> None:
    policy = ("--policy", "delta:full_layers=0,delta_layers=1,token_budget=32")
    ran = run("generate", PROMPT, "--model", path, *OPTIONS, *policy, "--json")
    assert ran.status == 0
    assert ran.err == ""
    found = json.loads(ran.out)
    assert set(found) == {f.name for f in dataclasses.fields(Result)} | {"model", "policy"}
    assert set(found["stats"]) == {f.name for f in dataclasses.fields(Stats)}
    assert set(found["policy"]) == {f.name for f in dataclasses.fields(Delta)} | {"name"}
    assert found["policy"]["delta_layers"] == [1]
    assert found["policy"]["recent_pages"] == 1
    assert found["stats"]["generated_tokens"] == len(found["token_ids"]) == 8
    assert 0 < found["stats"]["attended_fraction"] < 1


def test_several_completions_follow_each_other(path: str, run: Run) -> None:
    params = SamplingParams(
        n=3, max_tokens=8, ignore_eos=True, temperature=1.0, seed=5, logit_bias={40: -100.0}
    )
    wanted = LLM(path, device="cpu").generate(PROMPT, params).completions
    given = ("--n", "3", "--temperature", "1", "--seed", "5", "--logit-bias", "40=-100")
    ran = run("generate", PROMPT, "--model", path, *OPTIONS, *given)
    texts = [f"completion {i} of 3:\n{one.text}\n" for i, one in enumerate(wanted, 1)]
    assert ran.out == "".join(texts)
    assert ran.err.count("8 tokens |") == 3
    found = json.loads(run("generate", PROMPT, "--model", path, *OPTIONS, *given, "--json").out)
    completions = [found, *found["others"]]
    assert [one["token_ids"] for one in completions] == [one.token_ids for one in wanted]
    assert len({tuple(one["token_ids"]) for one in completions}) == 3


def test_a_bias_forbids_and_forces_tokens(path: str, run: Run) -> None:
    given = ("generate", PROMPT, "--model", path, *OPTIONS, "--json")
    first = json.loads(run(*given).out)["token_ids"][0]
    assert first not in json.loads(run(*given, "--logit-bias", f"{first}=-1000").out)["token_ids"]
    forced = run(*given, "--logit-bias", "77=1000", "--logit-bias", f"{first}=-1000")
    assert json.loads(forced.out)["token_ids"] == [77] * 8


def test_a_long_prompt_shows_how_far_it_is(
    path: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prefill was silent."""
    seen: list[tuple[str, int]] = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *, total: int, **options: object) -> None:
            seen.append(("total", total))
            assert options["disable"] is None  # only on a terminal
            super().__init__(total=total, disable=False, file=io.StringIO())

        def update(self, n: float | None = 1) -> None:
            seen.append(("computed", int(n or 0)))
            super().update(n)

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    ran = run("generate", PROMPT, "--model", path, *OPTIONS, "--prefill-chunk", "16")
    assert ran.status == 0
    (_, total), *steps = seen
    assert total > 16 * 3
    assert [number for _, number in steps] == [16] * (total // 16)


def test_an_empty_prompt_is_refused(path: str, run: Run) -> None:
    ran = run("generate", "--model", path, stdin=" \n")
    assert ran.status == 2
    assert ran.err == "error: the prompt is empty; give at least one word\n"
