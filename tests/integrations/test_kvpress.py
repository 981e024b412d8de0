"""What kvpress keeps is what the methods' formulas say, and answers are given at true positions.

Run by `make test-kvpress`, in an environment of its own.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keyhole
from keyhole.errors import ConfigError, KeyholeError, ModelError, UnknownNameError
from keyhole.models.loading import load
from tests.checkpoints import BOS, EOS, VOCAB_SIZE, make_model

# After Keyhole, whose attention function it then wraps, and before the oracle's.
pytest.importorskip("kvpress", reason="needs kvpress: run `make test-kvpress`")

from transformers import AutoModelForCausalLM, DynamicCache

from keyhole import Full
from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.core import Engine
from keyhole.evaluate.line_file import LineFile
from keyhole.evaluate.tasks import make_task
from keyhole.evaluate.workload import Answered
from keyhole.integrations.kvpress.__main__ import main
from keyhole.integrations.kvpress.answer import CompressedModel
from keyhole.integrations.kvpress.evaluation import Cell, Evaluation
from keyhole.integrations.kvpress.presses import Press, make_press, presses
from tests.oracle import Array, SparseModel, attention, best, visible

pytestmark = pytest.mark.filterwarnings("default")  # of kvpress and what it brings along

SNAPKV = {"window_size": 8, "kernel_size": 3}
EXPECTED = {"n_sink": 3, "n_future_positions": 20}
CONTEXT, QUESTION, NEW = 50, 7, 12
SEED = 2
"""Of a prompt where no two tokens on both sides of a cut have equal scores: either may be kept."""


# The formulas once more: queries [Hq, n, D] and keys [Hkv, m, D] as rotated, values [Hkv, m, D].
# Each gives a score for every KV head and token.


def weights(query: Array, keys: Array, last: int) -> Array:
    """Attention [Hq, m] of one query [Hq, D] over the first `last` keys; 0 beyond."""
    group = len(query) // len(keys)
    found = np.zeros((len(query), keys.shape[1]))
    for head, row in enumerate(query):
        logits = keys[head // group, :last] @ row / math.sqrt(len(row))
        found[head, :last] = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    return found


def per_group(scores: Array, heads: int) -> Array:
    """Mean over the query heads that share a KV head."""
    return scores.reshape(heads, -1, scores.shape[-1]).mean(1)


def snapkv(queries: Array, keys: Array, values: Array) -> Array:
    n, window, half = keys.shape[1], SNAPKV["window_size"], SNAPKV["kernel_size"] // 2
    rows = [weights(queries[:, t], keys, t + 1) for t in range(n - window, n)]
    received = per_group(np.mean(rows, 0), len(keys))[:, : n - window]
    padded = np.pad(received, ((0, 0), (half, half)))
    pooled = [padded[:, i : i + 2 * half + 1].mean(1) for i in range(n - window)]
    return np.pad(np.stack(pooled, 1), ((0, 0), (0, window)))


def observed_attention(queries: Array, keys: Array, values: Array) -> Array:
    n = keys.shape[1]
    rows = [weights(queries[:, t], keys, t + 1) for t in range(n)]
    return per_group(np.sum(rows, 0) / np.arange(n, 0, -1), len(keys))


def tova(queries: Array, keys: Array, values: Array) -> Array:
    mean = weights(queries[:, -1], keys, keys.shape[1]).mean(0)
    return np.stack([mean] * len(keys))


def knorm(queries: Array, keys: Array, values: Array) -> Array:
    return -np.sqrt((keys**2).sum(-1))


def keydiff(queries: Array, keys: Array, values: Array) -> Array:
    unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    anchor = unit.mean(1, keepdims=True)
    return -(unit * anchor).sum(-1) / np.linalg.norm(anchor, axis=-1)


def streaming_llm(queries: Array, keys: Array, values: Array) -> Array:
    return np.tile(np.arange(keys.shape[1], dtype=float), (len(keys), 1))


def expected_attention(queries: Array, keys: Array, values: Array) -> Array:
    """With queries as normally distributed, turned to the mean of the next positions."""
    n, dim, sink = keys.shape[1], keys.shape[2], EXPECTED["n_sink"]
    angle = 10000.0 ** (-np.arange(0, dim, 2) / dim)
    back = np.exp(-1j * np.arange(n)[:, None] * angle)
    flat = (queries[..., : dim // 2] + 1j * queries[..., dim // 2 :]) * back
    flat = np.concatenate((flat.real, flat.imag), -1)[:, sink:]
    future = np.arange(n, n + EXPECTED["n_future_positions"])[:, None]
    turn = np.exp(1j * future * angle).mean(0)
    turn = np.block(
        [[np.diag(turn.real), -np.diag(turn.imag)], [np.diag(turn.imag), np.diag(turn.real)]]
    )
    scores = np.zeros((len(flat), n))
    for head, rows in enumerate(flat):
        mean, spread = turn @ rows.mean(0), turn @ np.cov(rows.T, bias=True) @ turn.T
        own = keys[head // (len(flat) // len(keys)), sink:]
        logits = [k @ mean / math.sqrt(dim) + k @ spread @ k / (2 * dim) for k in own]
        scores[head, sink:] = np.exp(logits - max(logits))
        scores[head] /= scores[head].sum()
    return per_group(scores, len(keys)) * np.linalg.norm(values, axis=-1)


@dataclass(frozen=True)
class Formula:
    """Scores, how many of the first and last tokens are kept anyway, and the press's settings."""

    scores: Callable[[Array, Array, Array], Array]
    first: int = 0
    last: int = 0
    settings: dict[str, Any] | None = None


FORMULAS = {
    "snapkv": Formula(snapkv, last=8, settings=SNAPKV),
    "observed_attention": Formula(observed_attention),
    "tova": Formula(tova, last=1),
    "expected_attention": Formula(expected_attention, first=3, settings=EXPECTED),
    "knorm": Formula(knorm),
    "keydiff": Formula(keydiff),
    "streaming_llm": Formula(streaming_llm, first=2, settings={"n_sink": 2}),
}


class Pressed(SparseModel):
    """A whole transformers model in which tokens are dropped by a formula, without any cache.

    After the first `context` tokens all but `left` are dropped; after every `interval` tokens from
    `begin` on, all but `budget`. kept: layer -> for each KV head, the tokens left of the context.
    """

    def __init__(self, network: Any, formula: Formula, **counts: int | None) -> None:
        super().__init__(network, lambda *_: None)
        self.formula, self.counts = formula, counts
        self.kept: dict[int, list[list[int]]] = {}

    def attend(
        self,
        layer: int,
        query: Array,
        keys: Array,
        values: Array,
        window: int | None,
        options: dict[str, Any],
    ) -> Array:
        counts, there, rows = self.counts, [visible(0)] * len(keys), []
        for t in range(query.shape[1]):
            there = [[*tokens, t] for tokens in there]
            rows.append(attention(query[:, t], keys, values, there, **options)[0])
            steps = t + 1 - counts["begin"]
            if t + 1 == counts["context"]:
                there = self._press(query[:, : t + 1], keys, values, there, counts["left"])
                self.kept[layer] = there
            elif counts["interval"] and steps > 0 and steps % counts["interval"] == 0:
                there = self._press(query[:, : t + 1], keys, values, there, counts["budget"])
        return np.stack(rows)

    def _press(
        self, queries: Array, keys: Array, values: Array, there: list[list[int]], left: int
    ) -> list[list[int]]:
        own = [
            np.stack([x[i] for x, i in zip(part, there, strict=True)]) for part in (keys, values)
        ]
        formula = self.formula
        scores = formula.scores(queries, *own)
        chosen = [best(row, left, first=formula.first, last=formula.last) for row in scores]
        return [[tokens[i] for i in some] for tokens, some in zip(there, chosen, strict=True)]


class Watched(CompressedModel):
    """Keeps the logits that answers are chosen by, and the cache."""

    def __init__(self, path: str) -> None:
        super().__init__(load(path))
        self.logits: list[torch.Tensor] = []

    def _forward(self, tokens: Sequence[int], start: int, cache: Any) -> torch.Tensor:
        self.logits.append(super()._forward(tokens, start, cache))
        self.cache = cache
        return self.logits[-1]


def tokens(many: int, seed: int = 0) -> list[int]:
    """None stands twice: in the first layer both would have keys of the same length."""
    generator = torch.Generator().manual_seed(seed)
    return [BOS, *(3 + torch.randperm(VOCAB_SIZE - 3, generator=generator)[: many - 1]).tolist()]


def network(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()


def make(folder: Path, kind: str = "llama", **overrides: Any) -> str:
    """A model that never ends by itself."""
    return make_model(kind, folder, **({"eos_token_id": None} | overrides))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make(tmp_path_factory.mktemp("model"))


def kept_in(cache: Any, full: Any, left: int) -> dict[int, list[list[int]]]:
    """The tokens whose keys and values the first `left` entries of a cache are."""
    found = {}
    for layer, (some, every) in enumerate(zip(cache.layers, full.layers, strict=True)):
        a = torch.cat((some.keys, some.values), -1)[0, :, :left]
        b = torch.cat((every.keys, every.values), -1)[0]
        distance = torch.cdist(a.double(), b.double())
        assert float(distance.amin(-1).max()) < 1e-4
        found[layer] = distance.argmin(-1).sort(-1).values.tolist()
    return found


def assert_pressed(path: str, name: str, setup: str, budget: int, interval: int | None) -> None:
    """Kept tokens, logits and answer are those of the formula."""
    formula, prompt = FORMULAS[name], tokens(CONTEXT + QUESTION, SEED)
    context = CONTEXT + (QUESTION if setup == "prompt" else 0)
    press = make_press(name, budget, formula.settings, interval)
    model = Watched(path)
    answer = model.answer(press, prompt[:context], prompt[context:], NEW)
    left = budget - len(prompt) + context
    oracle = Pressed(
        network(path),
        formula,
        context=context,
        left=left,
        begin=len(prompt),
        interval=interval,
        budget=budget,
    )
    expected = oracle.logits([*prompt, *answer.tokens[:-1]], 0)[len(prompt) - 1 :]
    assert answer.tokens == expected.argmax(-1).tolist()
    torch.testing.assert_close(torch.stack(model.logits[-NEW:]), expected, atol=1e-3, rtol=1e-3)
    if interval is None:
        full = DynamicCache()
        with torch.no_grad():
            network(path)(torch.tensor([prompt[:context]]), past_key_values=full)
        assert kept_in(model.cache, full, left) == oracle.kept
        assert {len(one) for heads in oracle.kept.values() for one in heads} == {left}


@pytest.mark.parametrize("setup", ["prompt", "question"])
@pytest.mark.parametrize("name", FORMULAS)
def test_what_is_kept_is_what_the_formula_says(path: str, name: str, setup: str) -> None:
    assert_pressed(path, name, setup, budget=24, interval=None)


@pytest.mark.parametrize("name", ["snapkv", "tova", "expected_attention"])
@pytest.mark.parametrize("kind", ["llama_mqa", "llama_mha", "qwen2", "qwen3", "phi3"])
def test_it_is_so_in_other_models(tmp_path: Path, kind: str, name: str) -> None:
    assert_pressed(make(tmp_path, kind), name, "question", budget=24, interval=None)


@pytest.mark.parametrize("setup", ["prompt", "question"])
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("name", ["tova", "knorm", "keydiff"])
def test_it_is_so_while_decoding(path: str, name: str, interval: int, setup: str) -> None:
    assert_pressed(path, name, setup, budget=24, interval=interval)


def test_every_press_has_a_formula_here() -> None:
    assert set(presses()) == set(FORMULAS)


@pytest.mark.parametrize("setup", ["prompt", "question"])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_budget_for_all_gives_what_generate_gives(path: str, name: str, setup: str) -> None:
    prompt = tokens(CONTEXT + QUESTION, seed=1)
    context = CONTEXT + (QUESTION if setup == "prompt" else 0)
    press = make_press(name, len(prompt), FORMULAS[name].settings)
    answer = Watched(path).answer(press, prompt[:context], prompt[context:], NEW)
    right = network(path).generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )
    assert answer.tokens == right[0, len(prompt) :].tolist()
    assert answer.read_shares == [1.0] * (NEW - 1)


def test_an_answer_ends_where_generate_ends(tmp_path: Path) -> None:
    prompt, press = tokens(20), make_press("knorm", 64)
    endless = Watched(make(tmp_path)).answer(press, prompt, [], 20).tokens
    ends = endless[5]
    found = Watched(make(tmp_path, eos_token_id=[EOS, ends])).answer(press, prompt, [], 20)
    assert found.tokens == endless[: endless.index(ends) + 1]


def test_as_many_are_kept_as_the_budget_says() -> None:
    """Of kvpress's ratio a number is made in floating point: none may come out one less."""
    for length in [*range(2, 130), 1023, 1024, 4097, 65536, 131071]:
        for kept in {1, length // 3, length // 2, length - 1} - {0}:
            for question in (0, 5):
                press = make_press("knorm", kept + question)
                ratio = press.prefill(length, question).compression_ratio
                assert 0 < ratio < 1
                assert int(length * (1 - ratio)) == kept
        assert make_press("knorm", length + 5).prefill(length, 5) is None


def test_costs_are_those_of_the_steps(path: str) -> None:
    """4 layers, 2 KV heads of 8 numbers, float32: 512 bytes a token."""
    answer = Watched(path).answer(make_press("knorm", 20), tokens(50), [], 5)
    assert answer.bytes_read == [512 * (20 + step) for step in range(1, 5)]
    assert answer.read_shares == pytest.approx([(20 + step) / (50 + step) for step in range(1, 5)])
    # The last layer is there as a whole before it is pressed, the others are pressed by then.
    assert answer.peak_bytes == 128 * (3 * 20 + 50)
    assert len(answer.step_ms) == 4


@pytest.mark.parametrize("interval", [1, 3])
def test_an_interval_bounds_the_cache(path: str, interval: int) -> None:
    model = Watched(path)
    answer = model.answer(make_press("knorm", 20, interval=interval), tokens(50), [], 9)
    read = [20 + 1 + step % interval for step in range(8)]
    assert answer.bytes_read == [512 * many for many in read]


def test_answers_do_not_depend_on_earlier_ones(path: str) -> None:
    shared, prompt = Watched(path), tokens(40)
    for name in ("tova", "observed_attention", "knorm"):
        press = make_press(name, 16, interval=None if name[0] == "o" else 3)
        shared.answer(press, tokens(50, seed=5), tokens(4), NEW)
        alone = Watched(path).answer(press, prompt, [], NEW)
        assert shared.answer(press, prompt, [], NEW).tokens == alone.tokens


def test_keyhole_runs_beside_kvpress(path: str) -> None:
    """kvpress wraps every attention function there is, and gives it dropout by its place."""
    prompt = tokens(40)
    given = keyhole.LLM(path, policy="full").generate(
        {"prompt_token_ids": prompt}, SamplingParams(max_tokens=NEW, temperature=0.0)
    )
    right = Watched(path).answer(make_press("knorm", 64), prompt, [], NEW)
    assert list(given.token_ids) == right.tokens


def cell(**changes: Any) -> Cell:
    press = make_press("snapkv", 96, {"window_size": 16})
    fields = {"task": make_task("tiny_passkey"), "length": 256, "setup": "prompt", "press": press}
    return Cell(**(fields | {"samples": 2} | changes))


FIELDS = """
benchmark date command commit note machine versions model method samples fingerprint task
task_settings length setup policy settings budget engine score scores depths tokens_prompt
tokens_generated decode_steps read_share bytes_per_step step_ms peak_bytes recall_per_layer
selection_maps
""".split()


def test_a_line_says_what_was_measured() -> None:
    evaluation = Evaluation(load(keyhole.tiny()))
    for setup in ("prompt", "question"):
        line = json.loads(json.dumps(evaluation.line(cell(setup=setup))))
        assert sorted(line) == sorted(FIELDS)
        assert (line["benchmark"], line["task"], line["setup"]) == ("eval", "tiny_passkey", setup)
        assert (line["policy"], line["budget"], line["length"]) == ("kvpress:snapkv", 96, 256)
        assert line["settings"] == {"window_size": 16, "kernel_size": 5, "interval": None}
        assert line["score"] == sum(line["scores"]) / 2
        assert len(line["depths"]) == line["samples"] == 2
        assert {"kvpress", "keyhole", "torch", "transformers"} < set(line["versions"])
        assert 96 / 256 < line["read_share"] < 110 / 230


@pytest.mark.parametrize("setup", ["prompt", "question"])
def test_with_a_budget_for_all_the_line_is_that_of_keyhole(setup: str) -> None:
    """But for the question, which is one forward here and a decode step for each token there."""
    task, press = make_task("tiny_majority"), make_press("tova", 256)
    asked = cell(task=task, press=press, samples=4, setup=setup)
    line = Evaluation(load(keyhole.tiny())).line(asked)
    model = load(keyhole.tiny())
    full = Answered(task, model)
    wanted = full.measure(
        lambda policy: Engine(model, policy, EngineConfig(prefix_cache=False)),
        Full(),
        256,
        setup,
        4,
    )
    for name in ("score", "scores", "depths", "tokens_prompt", "tokens_generated", "read_share"):
        assert line[name] == wanted[name], name
    given = sum(len(one.given) for one in full.requests(full.samples(256, 4), setup))
    assert (given > 0) == (setup == "question")
    assert line["decode_steps"] == wanted["decode_steps"] - given
    assert line["decode_steps"] == 4 * (line["tokens_generated"] - 1)


CELLS = "--tasks passkey:depth=0.25 --lengths 256 --limit 1 --setup prompt,question".split()


def test_the_command_adds_a_line_for_every_cell(tmp_path: Path) -> None:
    output = tmp_path / "lines.jsonl"
    asked = "--presses snapkv:window_size=16:kernel_size=3,knorm --budgets 64,17".split()
    done = subprocess.run(
        [sys.executable, "-m", "keyhole.integrations.kvpress", *asked, *CELLS, "--output", output],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr  # with the question, 17 are too few
    assert "tiny_passkey 256 question snapkv 17: refused: budget 17 must be at least" in done.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["setup"], line["policy"], line["budget"]) for line in lines] == [
        ("prompt", "kvpress:snapkv", 64),
        ("prompt", "kvpress:snapkv", 17),
        ("prompt", "kvpress:knorm", 64),
        ("prompt", "kvpress:knorm", 17),
        ("question", "kvpress:snapkv", 64),
        ("question", "kvpress:knorm", 64),
        ("question", "kvpress:knorm", 17),
    ]
    assert lines[0]["command"].startswith("python -m keyhole.integrations.kvpress --presses")
    assert lines[0]["settings"] == {"window_size": 16, "kernel_size": 3, "interval": None}
    assert lines[0]["task_settings"] == {"depth": 0.25}
    assert len(done.stdout.splitlines()) == len(lines)


def test_what_is_there_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, line, measured = tmp_path / "lines.jsonl", Evaluation.line, []

    def counted(self: Evaluation, cell: Cell) -> dict[str, Any]:
        measured.append((cell.press.name, cell.press.budget, cell.setup, cell.samples))
        return line(self, cell)

    monkeypatch.setattr(Evaluation, "line", counted)
    asked = [*CELLS, "--presses", "knorm", "--output", str(output)]
    assert main([*asked, "--budgets", "64"]) == 0
    with output.open("a") as file:
        file.write('{"benchmark": "ev')  # of a run that was killed
    assert main([*asked, "--budgets", "64,96"]) == 0
    assert measured == [("knorm", n, s, 1) for n in (64, 96) for s in ("prompt", "question")]
    assert capsys.readouterr().out.count(", there already\n") == 2
    assert main([*asked, "--budgets", "96", "--limit", "2"]) == 0
    assert main([*asked, "--budgets", "96", "--presses", "knorm,keydiff"]) == 0
    assert measured[4:] == [
        ("knorm", 96, "prompt", 2),
        ("knorm", 96, "question", 2),
        ("keydiff", 96, "prompt", 1),
        ("keydiff", 96, "question", 1),
    ]
    assert len(LineFile(output).lines) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--presses snapvk", "unknown press 'snapvk'; did you mean 'snapkv'?"),
        ("--presses snapkv:window_size", "'snapkv:window_size' must be a name or name:setting="),
        ("--presses snapkv:window_size=x", "'snapkv:window_size=x' must be numbers, true or false"),
        ("--presses tova --tasks passkey,perplexity", "task perplexity forces a text; kvpress's"),
        ("--budgets 65,12", "budget 12 must be a whole number of tokens, at least 65 for snapkv"),
        ("--budgets 1/8", "--budgets '1/8' must be whole numbers"),
        ("--budgets 256 --tasks tiny_paskey", "unknown task 'tiny_paskey'; did you mean"),
        ("--presses tova --interval 0", "interval 0 must be at least 1"),
        ("--presses tova --setup A", "unknown setup 'A' (known: prompt, question)"),
        ("--presses tova --limit 0", "samples 0 must be at least 1"),
        ("no/where --presses tova", "no/where"),
    ],
)
def test_the_command_tells_what_is_wrong(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments.split(), "--output", str(tmp_path / "lines.jsonl")]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: ")
    assert message in told
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("snapvk", 64), UnknownNameError, "unknown press 'snapvk'; did you mean 'snapkv'"),
        (("knorm", 0), ConfigError, "budget 0 must be a whole number of tokens, at least 1"),
        (("knorm", 1.5), ConfigError, "budget 1.5 must be"),
        (("tova", 1), ConfigError, "budget 1 must be a whole number of tokens, at least 2"),
        (("snapkv", 64), ConfigError, "budget 64 must be a whole number of tokens, at least 65"),
        (("snapkv", 64, {"window": 8}), UnknownNameError, "did you mean 'window_size'"),
        (("snapkv", 64, {"compression_ratio": 0.5}), UnknownNameError, "'compression_ratio'"),
        (("snapkv", 64, {"window_size": 0}), ConfigError, "snapkv:window_size 0 must be"),
        (("snapkv", 99, {"kernel_size": 4}), ConfigError, "snapkv:kernel_size 4 must be odd"),
        (("expected_attention", 64, {"epsilon": -1}), ConfigError, "epsilon -1 must be at least 0"),
        (("expected_attention", 64, {"use_vnorm": 1}), ConfigError, "use_vnorm 1 must be true"),
        (
            ("streaming_llm", 4),
            ConfigError,
            "budget 4 must be a whole number of tokens, at least 5",
        ),
        (("knorm", 64, {}, 0), ConfigError, "interval 0 must be at least 1"),
        (("snapkv", 99, {}, 8), ConfigError, "these can: keydiff, knorm, tova"),
    ],
    ids=str,
)
def test_a_wrong_press_is_named(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        make_press(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["gpt_bigcode", "gemma2", "deepseek_v3", "gpt_oss"])
def test_a_model_that_kvpress_does_not_know_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ModelError, match=r"kvpress does not support .*supported: LlamaFor"):
        CompressedModel(load(make_model(kind, tmp_path)))


@pytest.mark.parametrize("kind", ["mistral_sliding", "qwen2_sliding"])
def test_a_model_with_windows_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ModelError, match="layers with a sliding window"):
        CompressedModel(load(make_model(kind, tmp_path)))


def test_a_model_without_tokenizer_is_refused(path: str) -> None:
    with pytest.raises(ModelError, match="has no tokenizer"):
        Evaluation(load(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"setup": "promt"}, "unknown setup 'promt'; did you mean 'prompt'"),
        ({"length": 20000}, "length 20000 is more than the 16384 tokens"),
        ({"samples": 0}, "samples 0 must be at least 1"),
        (
            {"setup": "question", "press": Press(name="knorm", settings={}, budget=2)},
            "budget 2 must be at least .* knorm keeps 1 tokens or more",
        ),
    ],
    ids=str,
)
def test_a_wrong_cell_is_named(changes: dict[str, Any], message: str) -> None:
    evaluation = Evaluation(load(keyhole.tiny()))
    with pytest.raises(KeyholeError, match=message):
        evaluation.line(cell(**changes))
