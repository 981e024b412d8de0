"""With full attention "keyhole" answers as lm-evaluation-harness's own model "hf" does.

Run by `make test-lm-eval`, in a separate environment.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_model

pytest.importorskip("lm_eval", reason="needs lm-eval: run `make test-lm-eval`")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from keyhole.errors import ConfigError, KeyholeError, RequestError, UnknownNameError
from keyhole.integrations.lm_eval import KeyholeLM
from keyhole.models.loading import load

pytestmark = pytest.mark.filterwarnings("default")  # of the harness and what it brings along

MAX_LENGTH = 128
WORDS = "the key lies under a blue stone near old river and Ann sells nine é ü 7 42".split()

TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": ["\n", "Q:"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def sentence(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return make_model("llama", folder, tokenizer=True, max_position_embeddings=MAX_LENGTH)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of local tasks over the same eight questions."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [
        {"question": sentence(i, 3 + i), "choices": [sentence(40 + i, 2), "no", ""], "label": i % 2}
        for i in range(8)
    ]
    for line in lines:
        line["choices"] = [f" {choice}" for choice in line["choices"] if choice]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "lines.jsonl")}},
        "test_split": "test",
    }
    for name, task in TASKS.items():
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": f"local_{name}"} | data | task))
    return folder


def hf(path: str, **settings: Any) -> HFLM:
    return HFLM(pretrained=path, device="cpu", dtype="float32", **settings)


def ours(path: str, **settings: Any) -> KeyholeLM:
    return KeyholeLM(path, **({"dtype": "float32"} | settings))


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=given, idx=i)
        for i, given in enumerate(arguments)
    ]


def scored(lm: Any, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    return lm.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)


def rolled(lm: Any, texts: list[str]) -> list[float]:
    requests = instances("loglikelihood_rolling", [(text,) for text in texts])
    return lm.loglikelihood_rolling(requests, disable_tqdm=True)


def generated(lm: Any, pairs: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return lm.generate_until(instances("generate_until", pairs), disable_tqdm=True)


def assert_scores_equal(
    found: list[tuple[float, bool]], expected: list[tuple[float, bool]]
) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    for (score, _), (right, _) in zip(found, expected, strict=True):
        assert score == pytest.approx(right, abs=1e-4, rel=1e-6)


#: Policies that read everything here, however they choose.
POLICIES = [
    {},
    {"policy": "full", "batch_size": 3},
    {"policy": "delta", "token_budget": 2 * MAX_LENGTH},
    {"policy": "quest", "token_budget": 2 * MAX_LENGTH},
    {"policy": "streaming_llm", "token_budget": 2 * MAX_LENGTH},
]
BOS = [{}, {"add_bos_token": False}, {"add_bos_token": True}, {"prefix_token_id": 5}]

PAIRS = [
    ("the key lies", " under a stone"),
    ("the key lies ", "under a stone"),  # the space goes over to the continuation
    ("the key lies", " u"),  # one token
    ("the key lies", " x"),  # the same context
    ("", "a text without context"),
    ("", "<s>a text that begins with one"),
    ("<s>the key lies", " here"),
    ("é", "ü7"),
    (sentence(1, 60), " after a context that is too long"),
    ("short", sentence(2, 60)[: MAX_LENGTH - 2]),  # nothing of the context is left
]


@pytest.mark.parametrize("settings", POLICIES, ids=str)
def test_loglikelihood_is_that_of_hf(path: str, settings: dict[str, Any]) -> None:
    assert_scores_equal(scored(ours(path, **settings), PAIRS), scored(hf(path), PAIRS))


@pytest.mark.parametrize("bos", BOS, ids=str)
def test_tokens_are_those_of_hf(path: str, bos: dict[str, Any]) -> None:
    mine, theirs = ours(path, **bos), hf(path, **bos)
    for context, continuation in PAIRS:
        for text in (context, continuation):
            assert mine.tok_encode(text) == theirs.tok_encode(text)
    assert mine.prefix_token_id == theirs.prefix_token_id
    assert mine.max_length == theirs.max_length
    assert mine.tokenizer_name == theirs.tokenizer_name
    assert_scores_equal(scored(mine, PAIRS), scored(theirs, PAIRS))
    texts = [sentence(3, 4), "<s>begun"]
    wanted = [(text, {"until": ["\n"], "max_gen_toks": 8}) for text in texts]
    assert generated(mine, wanted) == generated(theirs, wanted)
    assert rolled(mine, texts) == pytest.approx(rolled(theirs, texts), abs=1e-4, rel=1e-6)


def test_what_greedy_decoding_gives_is_greedy(path: str) -> None:
    lm, context = ours(path), "the key lies"
    ids = lm.tok_encode(context)
    with torch.no_grad():
        for _ in range(3):
            ids.append(int(hf(path).model(torch.tensor([ids])).logits[0, -1].argmax()))
    request = (("", ""), ids[:-3], ids[-3:])
    wrong = (("", ""), ids[:-3], [*ids[-3:-1], ids[-1] ^ 1])
    answers = lm._loglikelihood_tokens([request, wrong], disable_tqdm=True)
    assert [greedy for _, greedy in answers] == [True, False]


@pytest.mark.parametrize("max_length", [None, 40])
def test_truncation_is_that_of_hf(path: str, max_length: int | None) -> None:
    mine, theirs = ours(path, max_length=max_length), hf(path, max_length=max_length)
    longest = max_length or MAX_LENGTH
    text = sentence(5, 80)
    # One token less than what fits, what fits, one more: the first token is the BOS.
    pairs = [(text[: longest - 7 + more], " 12345") for more in (-2, -1, 0, 1, 2, 20)]
    assert_scores_equal(scored(mine, pairs), scored(theirs, pairs))
    wanted = [(pair[0], {"until": [], "max_gen_toks": 9}) for pair in pairs]
    assert generated(mine, wanted) == generated(theirs, wanted)


@pytest.mark.parametrize("settings", POLICIES, ids=str)
def test_rolling_loglikelihood_is_that_of_hf(path: str, settings: dict[str, Any]) -> None:
    text = sentence(6, 200)
    texts = [text[:n] for n in (1, 5, MAX_LENGTH - 2, MAX_LENGTH - 1, MAX_LENGTH, 300, 520)]
    expected = rolled(hf(path), texts)
    assert rolled(ours(path, **settings), texts) == pytest.approx(expected, abs=1e-4, rel=1e-6)


@pytest.mark.parametrize("settings", POLICIES, ids=str)
def test_generated_text_is_that_of_hf(path: str, settings: dict[str, Any]) -> None:
    contexts = [sentence(10 + i, 2 + 3 * i) for i in range(8)]
    free = generated(hf(path), [(text, {"until": [], "max_gen_toks": 40}) for text in contexts])
    assert all(free)
    wanted: list[tuple[str, dict[str, Any]]] = []
    for context, text in zip(contexts, free, strict=True):
        wanted += [
            (context, {"until": [text[5:7], "never seen"], "max_gen_toks": 40}),
            (context, {"until": text[3], "max_new_tokens": 12}),
            (context, {"until": ["</s>", ""][:1], "max_tokens": 5, "temperature": 0.0}),
            (context, {"max_gen_toks": 20, "repetition_penalty": 1.5, "num_beams": 1}),
        ]
    assert generated(ours(path, **settings), wanted) == generated(hf(path), wanted)


def test_a_special_token_stops_as_in_hf(path: str) -> None:
    """It is not part of the text, so stop strings did not match it."""
    context = "the key lies"
    mine, theirs = ours(path), hf(path)
    for seed in range(20):
        context = sentence(seed, 3)
        with torch.no_grad():
            ids = torch.tensor([theirs.tok_encode(context)])
            out = theirs.model.generate(ids, max_new_tokens=60, do_sample=False)
        if 0 in out[0].tolist()[ids.shape[1] :]:  # <pad>
            break
    else:
        pytest.fail("no answer has a special token")
    wanted = [(context, {"until": ["<pad>"], "max_gen_toks": 64})]
    assert generated(mine, wanted) == generated(theirs, wanted)


def test_a_budget_is_kept(path: str) -> None:
    """A small budget changes what is decoded under the policy, and only that."""
    context, settings = sentence(7, 20), {"policy": "streaming_llm", "token_budget": 32}
    one, more = (context, "x"), (context, " sells nine stones")
    exact, sparse = scored(hf(path), [one, more]), scored(ours(path, **settings), [one, more])
    assert_scores_equal(sparse[:1], exact[:1])
    assert abs(sparse[1][0] - exact[1][0]) > 1e-2
    text = sentence(8, 24)
    assert abs(rolled(ours(path, **settings), [text])[0] - rolled(hf(path), [text])[0]) > 1e-2


def test_logits_that_were_read_are_not_kept(path: str) -> None:
    lm = ours(path)
    add, added = lm._engine.add, []

    def keeping(*given: Any, **named: Any) -> Any:
        added.append(add(*given, **named))
        return added[-1]

    lm._engine.add = keeping
    scored(lm, PAIRS)
    assert len(added) == len(PAIRS)
    assert all(row.numel() == 0 for sequence in added for row in sequence.logits)


def test_chat_template_is_that_of_hf(path: str) -> None:
    mine, theirs = ours(path), hf(path)
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "who?"}]
    assert mine.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    begun = [*messages, {"role": "assistant", "content": "It is"}]
    asked = {"add_generation_prompt": False}
    assert mine.apply_chat_template(begun, **asked) == theirs.apply_chat_template(begun, **asked)
    assert mine.chat_template(True) == theirs.chat_template(True)


def test_a_template_without_system_messages_gets_none(path: str) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}"
        "{% endif %}{{ m['content'] }}{% endfor %}"
    )
    mine, theirs = ours(path), hf(path)
    mine.tokenizer.chat_template = theirs.tokenizer.chat_template = template
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "who?"}]
    assert mine.apply_chat_template(messages) == theirs.apply_chat_template(messages) == "who?"


@pytest.mark.parametrize("end", [" ", "101", 101])
def test_thinking_is_taken_off_as_in_hf(path: str, end: str | int) -> None:
    contexts = [sentence(20 + i, 4) for i in range(6)]
    wanted = [(text, {"until": ["zz"], "max_gen_toks": 50}) for text in contexts]
    settings = {"think_end_token": end}
    assert generated(ours(path, **settings), wanted) == generated(hf(path, **settings), wanted)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("settings", POLICIES[1:3], ids=str)
def test_tasks_give_what_they_give_with_hf(
    path: str, tasks: Path, settings: dict[str, Any], chat: bool
) -> None:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found, expected = (
        simple_evaluate(
            model=lm,
            tasks=[f"local_{name}" for name in TASKS],
            task_manager=manager,
            apply_chat_template=chat,
            bootstrap_iters=0,
        )
        for lm in (ours(path, **settings), hf(path))
    )
    for name, scores in expected["results"].items():
        for metric, value in scores.items():
            right = value if isinstance(value, str) else pytest.approx(value, rel=1e-4)
            assert found["results"][name][metric] == right, (name, metric)
    for name, samples in expected["samples"].items():
        for mine, theirs in zip(found["samples"][name], samples, strict=True):
            assert mine["arguments"] == theirs["arguments"]
            if name == "local_answer":
                assert mine["resps"] == theirs["resps"]


def test_the_command_line_runs_a_task(path: str, tasks: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "keyhole.integrations.lm_eval", "--model", "keyhole"]
    command += ["--include_path", str(tasks), "--tasks", "local_answer", "--limit", "2"]
    output = ["--output_path", str(tmp_path / "out"), "--model_args"]
    done = run([*command, *output, f"pretrained={path},policy=delta,token_budget=64"])
    assert done.returncode == 0, done.stderr
    assert "local_answer" in done.stdout
    (stored,) = (tmp_path / "out").rglob("results_*.json")
    config = json.loads(stored.read_text())["config"]
    assert config["keyhole_policy"] == "delta"
    assert config["keyhole_settings"]["token_budget"] == 64
    assert config["keyhole_settings"]["recent_pages"] == 1  # settled
    wrong = run([*command, "--model_args", f"pretrained={path},policy=dleta"])
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[-1].startswith("error: unknown policy 'dleta'; did you mean")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "HF_DATASETS_OFFLINE": "1"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"policy": "dleta"}, UnknownNameError, "unknown policy 'dleta'; did you mean 'delta'"),
        (
            {"policy": "delta", "tokn_budget": 64},
            UnknownNameError,
            "setting of keyhole with delta 'tokn_budget'; did you mean 'token_budget'",
        ),
        ({"max_lenght": 64}, UnknownNameError, "'max_lenght'; did you mean 'max_length'"),
        ({"policy": "full", "token_budget": 64}, UnknownNameError, "with full 'token_budget'"),
        ({"policy": "delta", "token_budget": 3}, ConfigError, "token_budget 3 must be"),
        ({"max_length": 129}, ConfigError, "max_length 129 must be from 1 to 128"),
        ({"batch_size": "many"}, ConfigError, "batch_size 'many' must be"),
        ({"page_size": 0}, ConfigError, "page_size 0 must be"),
        ({"enable_thinking": True}, ConfigError, "needs think_end_token"),
        ({"tokenizer": "no/where"}, KeyholeError, "tokenizer 'no/where' cannot be loaded"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(
    path: str, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        ours(path, **settings)
    assert message in str(caught.value)


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyholeError, match="has no tokenizer"):
        ours(make_model("llama", tmp_path))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"top_q": 1}, "unknown generation setting 'top_q'; did you mean 'top_p'"),
        ({"num_beams": 4}, "num_beams 4 must be 1"),
        ({"max_gen_toks": MAX_LENGTH}, f"max_gen_toks {MAX_LENGTH} must be"),
        ({"do_sample": True, "top_p": 7}, "top_p 7 must be"),
    ],
)
def test_a_wrong_generation_setting_is_named(
    path: str, kwargs: dict[str, Any], message: str
) -> None:
    lm = ours(path)
    with pytest.raises(KeyholeError) as caught:
        generated(lm, [("a", {"max_gen_toks": 5}), ("b", {"max_gen_toks": 5} | kwargs)])
    assert message in str(caught.value)
    assert not lm._engine.has_work


def test_a_continuation_without_tokens_is_refused(path: str) -> None:
    with pytest.raises(RequestError, match="continuation of 0 tokens"):
        scored(ours(path), [("context", "")])


def test_samples_repeat_with_the_seed_of_the_harness(path: str) -> None:
    lm, answers = ours(path), []
    wanted = [("a", {"until": [], "do_sample": True, "temperature": 1.0, "max_gen_toks": 20})] * 2
    for _ in range(2):
        random.seed(3)
        answers.append(generated(lm, wanted))
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_a_loaded_model_is_shared(path: str) -> None:
    model = load(path, "cpu", "float32")
    lm = KeyholeLM(model, "delta", token_budget=64)
    assert lm._engine.model.network is model.network
    assert lm._engine.config.max_batch == 8
    assert KeyholeLM(model, max_batch=2)._engine.config.max_batch == 2
