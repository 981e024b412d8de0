"""LoRA adapters as models of the server, by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from keyhole import LLM, ConfigError, SamplingParams
from tests.checkpoints import make_model
from tests.server.conftest import serving

peft = pytest.importorskip("peft", reason="real adapters need it: pip install 'keyhole[lora]'")
pytestmark = [
    pytest.mark.filterwarnings("default"),  # peft has its own
    pytest.mark.usefixtures("own_engine"),
]

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
TEXT = "a text that is continued"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    base = Path(make_model("llama", folder, tokenizer=True, vocab_size=300))
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(folder / "adapter")
    adapters = {"verbose": folder / "adapter"}
    return LLM(base, memory="8MiB", max_batch=4, adapters=adapters, documents=folder / "d")


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[openai.OpenAI]:
    with (
        serving(llm, served_model_name="small") as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


def test_they_are_listed_beside_the_model(client: openai.OpenAI) -> None:
    assert [(one.id, one.parent) for one in client.models.list()] == [  # type: ignore[attr-defined]
        ("small", None),
        ("verbose", "small"),
    ]
    assert client.models.retrieve("verbose").id == "verbose"


def test_the_model_of_a_request_chooses_one(client: openai.OpenAI, llm: LLM) -> None:
    texts = {}
    for model, adapter in (("small", None), ("verbose", "verbose")):
        answer = client.completions.create(
            model=model,
            prompt=TEXT,
            max_tokens=8,
            temperature=0.0,
            extra_body={"ignore_eos": True},
        )
        params = SamplingParams(**{**vars(PARAMS), "adapter": adapter})
        assert answer.choices[0].text == llm.generate(TEXT, params).text
        assert answer.model == model
        texts[model] = answer.choices[0].text
    assert texts["small"] != texts["verbose"]


def test_chat_and_responses_choose_one_too(client: openai.OpenAI) -> None:
    for model in ("small", "verbose"):
        said = client.responses.create(
            model=model, input=TEXT, max_output_tokens=8, temperature=0.0, store=False
        )
        assert said.model == model


def test_a_document_that_the_adapter_has_not_encoded_is_named(
    client: openai.OpenAI, llm: LLM
) -> None:
    """That was status 500, with advice that helps at the server only."""
    llm.documents.add("facts", "some text of a document")
    asked: Any = [{"role": "user", "content": "which?"}]
    body = {"documents": ["facts"]}
    with pytest.raises(openai.BadRequestError, match="not encoded with adapter 'verbose'") as error:
        client.chat.completions.create(
            model="verbose", messages=asked, max_tokens=2, extra_body=body
        )
    assert error.value.param == "documents"
    llm.documents_with("verbose").add("facts", "some text of a document")
    for model in ("small", "verbose"):
        made = client.chat.completions.create(
            model=model, messages=asked, max_tokens=2, extra_body=body
        )
        assert made.model == model


def test_an_adapter_with_the_name_of_the_model_is_refused(llm: LLM) -> None:
    with (
        pytest.raises(ConfigError, match="adapter 'verbose' has the same name as the served model"),
        serving(llm, served_model_name="verbose"),
    ):
        raise AssertionError("it must not start")


def test_another_name_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="use 'small' or 'verbose'"):
        client.completions.create(model="terse", prompt=TEXT)
