"""Stored documents in vLLM: the tokens are those of Keyhole's engine over the same documents.

Run by `make test-vllm`, in a separate environment.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run `make test-vllm`")

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.exceptions import VLLMValidationError

from keyhole.config import SamplingParams
from keyhole.llm import LLM
from tests.documents.test_remote import ShareFileSystem
from tests.integrations.vllm.engines import (
    PAGE_SIZE,
    make_checkpoint,
    random_prompts,
    start,
)

pytestmark = pytest.mark.filterwarnings("default")  # of vLLM and what it brings along

COUNT = 24
#: A whole number of pages, no whole number, less than a page, and more than a block of 64.
DOCUMENTS = dict(
    zip(
        ("pages", "ragged", "short", "long"),
        random_prompts(2 * PAGE_SIZE, 45, 7, 150, seed=7),
        strict=True,
    )
)
QUESTION = random_prompts(20, seed=8)[0]
#: In another order than they were stored in, and one twice.
NAMES = ["ragged", "long", "pages", "short", "ragged"]


def ids(tokens: list[int]) -> Any:
    return {"prompt_token_ids": tokens}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents")


@pytest.fixture(scope="module")
def own(checkpoint: str, place: Path) -> LLM:
    """Keyhole's engine, which encoded the documents."""
    llm = LLM(
        checkpoint,
        dtype="float32",
        device="cpu",
        memory="64MB",
        page_size=PAGE_SIZE,
        documents=str(place),
    )
    for name, tokens in DOCUMENTS.items():
        llm.documents.add(name, ids(tokens))
    return llm


@pytest.fixture(scope="module")
def engine(checkpoint: str, own: LLM, place: Path) -> vllm.LLM:
    return start(
        checkpoint,
        kv_transfer_config={
            "kv_connector": "KeyholeConnector",
            "kv_role": "kv_consumer",
            # Through fsspec, by byte ranges, as from another machine.
            "kv_connector_extra_config": {"documents": f"{ShareFileSystem.protocol}://{place}"},
        },
    )


def asked(documents: Any, **more: Any) -> vllm.SamplingParams:
    transfer = {"documents": documents, **more}
    return vllm.SamplingParams(
        max_tokens=COUNT,
        temperature=0.0,
        ignore_eos=True,
        extra_args={"kv_transfer_params": transfer},
    )


def own_answer(own: LLM, names: list[str], reuse: str, **more: Any) -> Any:
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    return own.ask(ids(QUESTION), documents=names, reuse=reuse, params=params, **more)


def tokens_of(engine: vllm.LLM, prompt: list[int], params: vllm.SamplingParams) -> list[int]:
    (output,) = engine.generate([ids(prompt)], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("reuse", ["reuse", "reuse:rotate=False", "epic:num_initial=8", "epic"])
@pytest.mark.parametrize("separator", [[], [10, 11, 12]])
def test_the_tokens_are_those_of_keyholes_engine(
    reuse: str, separator: list[int], engine: vllm.LLM, own: LLM
) -> None:
    """Documents of any length, after a prefix, in any order."""
    expected = own_answer(own, NAMES, reuse, prefix=ids([1]), separator=ids(separator))
    prompt = list(expected.prompt_token_ids)
    got = tokens_of(engine, prompt, asked(NAMES, reuse=reuse))
    assert got == list(expected.token_ids)
    assert got != own_tokens_of(own, prompt), "the documents were computed, not loaded"


#: Blocks of 64, of which the middle ones are dropped or kept: 6 and 5, and one that is all ends.
BOOKS = dict(zip(("one", "two"), random_prompts(360, 290, seed=11), strict=True))
CHOICES = {
    "share": "sam_kv:recompute=False,share=0.5",
    "extremes": "sam_kv:recompute=False,share=0.5,score=extremes,bias=False",
    "ends": "sam_kv:recompute=False,select=False",
    "paper": "sam_kv:recompute=False",
}


@pytest.fixture(scope="module")
def books(own: LLM) -> None:
    for name, tokens in BOOKS.items():
        own.documents.add(name, ids(tokens))


@pytest.mark.usefixtures("books")
@pytest.mark.parametrize("reuse", CHOICES.values(), ids=CHOICES)
def test_pages_that_sam_kv_drops_are_not_read(reuse: str, engine: vllm.LLM, own: LLM) -> None:
    """Layers choose different pages; documents begin anywhere in a page."""
    names = ["two", "short", "one"]
    expected = own_answer(own, names, reuse, separator=ids([10, 11, 12]))
    prompt = list(expected.prompt_token_ids)
    assert expected.stats.sequence_ratio < 0.9
    got = tokens_of(engine, prompt, asked(names, reuse=reuse))
    assert got == list(expected.token_ids)
    whole = tokens_of(engine, prompt, asked(names))
    assert got != whole, "nothing was dropped"


@pytest.mark.usefixtures("books")
def test_such_requests_run_beside_others(engine: vllm.LLM, own: LLM) -> None:
    """Each has pages of its own in each layer; the others read everything."""
    kinds = [(["one"], CHOICES["share"]), (["two"], "reuse"), (["two"], CHOICES["share"])]
    expected = [own_answer(own, names, reuse) for names, reuse in kinds] * 2
    given = [ids(list(answer.prompt_token_ids)) for answer in expected]
    each = [asked(names, reuse=reuse) for names, reuse in kinds] * 2
    outputs = engine.generate(given, each, use_tqdm=False)
    got = [list(output.outputs[0].token_ids) for output in outputs]
    assert got == [list(answer.token_ids) for answer in expected]


@pytest.mark.usefixtures("books")
@pytest.mark.parametrize("reuse", ["epic:num_initial=8", CHOICES["share"]])
def test_preempted_requests_load_their_documents_again(
    reuse: str, engine: vllm.LLM, own: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    preempted: list[str] = []
    plain = scheduler._preempt_request

    def count(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        plain(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", count)
    # 10 pages each at the start, 15 at the end, of 63.
    params = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    expected = own.ask(ids(QUESTION), documents=["two"], reuse=reuse, params=params)
    each = asked(["two"], reuse=reuse)
    each.max_tokens = 150
    prompts = [ids(list(expected.prompt_token_ids))] * 6
    outputs = engine.generate(prompts, each, use_tqdm=False)
    assert preempted
    assert [list(x.outputs[0].token_ids) for x in outputs] == [list(expected.token_ids)] * 6


@pytest.mark.usefixtures("books")
def test_aborted_requests_leave_nothing_behind(engine: vllm.LLM, own: LLM) -> None:
    """Some while their documents are loaded, some before they choose, some while they decode."""
    core = engine.llm_engine
    answers = [own_answer(own, [name], CHOICES["share"]) for name in BOOKS] * 10
    for number, answer in enumerate(answers):
        params = asked([list(BOOKS)[number % 2]], reuse=CHOICES["share"])
        core.add_request(str(number), ids(list(answer.prompt_token_ids)), params)
    got = {}
    # Steps do nothing while documents are loaded: how many there are depends on the machine.
    until = time.monotonic() + 120
    for step in itertools.count():
        if step % 3 == 0 and step < 30:
            core.abort_request([str(step), str(step + 1)])
        for output in core.step():
            if output.finished:
                got[int(output.request_id)] = list(output.outputs[0].token_ids)
        if not core.has_unfinished_requests() or time.monotonic() > until:
            break
    assert 0 < len(got) < len(answers)
    assert all(got[number] == list(answers[number].token_ids) for number in got)
    tokens_of(engine, QUESTION, vllm.SamplingParams(max_tokens=2))  # tells workers who ended
    scheduler = core.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 63
    worker: Any = get_kv_transfer_group()
    left = (worker._loading, worker._kept, worker._ended, worker._loader._held)
    assert not any(left)
    assert not scheduler.connector._begun


@pytest.mark.usefixtures("books")
@pytest.mark.parametrize(
    ("reuse", "more", "said"),
    [
        ("sam_kv", {}, "recomputes tokens between dropped ones.*give 'sam_kv:recompute="),
        ("sam_kv:recompute=False,update=fusion", {}, "fuses new keys with stored ones"),
        ("sam_kv:recompute=False,num_local_blocks=0,bias=False", {}, "num_local_blocks must be"),
        ("sam_kv:recompute=False,block_size=32", {}, "stored in blocks of 64 tokens"),
        ("sam_kv:recompute=False,block_size=48", {}, "block_size 48 must be a multiple of .* 32"),
        ("sam_kv:recompute=False", {"n": 2, "temperature": 1.0}, "n 2 must be 1"),
        ("multi_infllm", {}, "may drop parts of documents"),
    ],
)
def test_a_choice_that_vllm_cannot_express_is_refused_by_name(
    reuse: str, more: dict[str, Any], said: str, engine: vllm.LLM, own: LLM
) -> None:
    params = asked(["one"], reuse=reuse)
    for name, value in more.items():
        setattr(params, name, value)
    with pytest.raises(VLLMValidationError, match=said):
        tokens_of(engine, BOOKS["one"] + QUESTION, params)


@pytest.mark.usefixtures("books")
def test_a_question_longer_than_the_middle_blocks_is_refused(engine: vllm.LLM) -> None:
    question = random_prompts(200, seed=12)[0]
    with pytest.raises(VLLMValidationError, match="the question has 200 tokens"):
        tokens_of(engine, BOOKS["two"] + question, asked(["two"], reuse=CHOICES["share"]))


def own_tokens_of(own: LLM, prompt: list[int]) -> list[int]:
    params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    (result,) = own.generate([ids(prompt)], params)
    return list(result.token_ids)


def test_a_plain_request_afterwards_is_exact(engine: vllm.LLM, own: LLM) -> None:
    """Pages of documents are not found by a request that computes the same prompt."""
    expected = own_answer(own, NAMES, "reuse")
    prompt = list(expected.prompt_token_ids)
    got = [tokens_of(engine, prompt, asked(NAMES)) for _ in range(2)]
    assert got == [list(expected.token_ids)] * 2
    plain = vllm.SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    outputs = [engine.generate([ids(prompt)], plain, use_tqdm=False)[0] for _ in range(2)]
    assert [list(x.outputs[0].token_ids) for x in outputs] == [own_tokens_of(own, prompt)] * 2
    # Its own pages are found again.
    assert [bool(output.num_cached_tokens) for output in outputs] == [False, True]


def test_recompute_computes_the_prompt_like_any_other(engine: vllm.LLM, own: LLM) -> None:
    prompt = DOCUMENTS["long"] + QUESTION
    got = tokens_of(engine, prompt, asked(["long"], reuse="recompute"))
    assert got == own_tokens_of(own, prompt)


def test_many_requests_load_beside_those_that_decode(engine: vllm.LLM, own: LLM) -> None:
    """More than fit into the pages at once, some with documents and some without."""
    kinds = [["long", "pages"], ["ragged"], ["pages", "long", "short"], ["short", "pages"]]
    reuse = "epic:num_initial=4"
    expected = [own_answer(own, names, reuse) for names in kinds] * 3
    plain = random_prompts(*[90] * len(expected), seed=9)
    params = vllm.SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    given, each = [], []
    for names, answer, prompt in zip(kinds * 3, expected, plain, strict=True):
        given += [ids(list(answer.prompt_token_ids)), ids(prompt)]
        each += [asked(names, reuse=reuse), params]
    outputs = engine.generate(given, each, use_tqdm=False)
    got = [list(output.outputs[0].token_ids) for output in outputs]
    assert got[::2] == [list(answer.token_ids) for answer in expected]
    assert got[1::2] == [own_tokens_of(own, prompt) for prompt in plain]


@pytest.mark.parametrize(
    ("transfer", "said"),
    [
        ({"documents": ["lnog"]}, "unknown document 'lnog'; did you mean 'long'"),
        ({"documents": []}, r"documents \[\] must be a list of at least one stored name"),
        ({"documents": ["long"], "reuse": "epik"}, "did you mean 'epic'"),
        ({"documents": ["long"], "reuse": "epic:num_initial=-1"}, "num_initial -1 must be"),
        ({"documents": ["long"], "reuse": "cacheblend"}, "'cacheblend' cannot run in vLLM"),
        ({"documents": ["long"], "method": "epic"}, "'method' must be one of"),
        (
            {"documents": ["pages", "long"]},
            "150 tokens of document 'long' are not in the prompt from token 214 on",
        ),
        ({"documents": ["long", "pages"]}, "the prompt ends with document 'pages'"),
    ],
)
def test_a_bad_request_is_refused_with_one_line_and_the_engine_goes_on(
    transfer: dict[str, Any], said: str, engine: vllm.LLM, own: LLM
) -> None:
    prompt = DOCUMENTS["long"] + DOCUMENTS["pages"]
    params = asked(None)
    params.extra_args = {"kv_transfer_params": transfer}
    with pytest.raises(VLLMValidationError, match=said) as error:
        tokens_of(engine, prompt, params)
    assert "\n" not in str(error.value)


def test_a_record_that_goes_away_ends_its_request_alone(
    engine: vllm.LLM, own: LLM, place: Path
) -> None:
    own.documents.add("gone", ids(random_prompts(40, seed=10)[0]))
    digest = own.documents.get("gone").digest
    prompt = random_prompts(40, seed=10)[0] + QUESTION
    assert len(tokens_of(engine, prompt, asked(["gone"]))) == COUNT
    for record in (place / "records").glob(f"{digest}*"):
        record.unlink()
    # Its tokens are known from the request before: the load finds that it is gone.
    (output,) = engine.generate([ids(prompt)], asked(["gone"]), use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert len(tokens_of(engine, DOCUMENTS["long"] + QUESTION, asked(["long"]))) == COUNT
