"""Time to the first token of questions over stored documents, in a model with random weights.

Documents of random tokens are encoded and stored once. The methods are then interleaved: ours load
the documents from the store and compute the rest of the prompt; `recompute` computes all of it, and
so does transformers. The logits of these two must agree before timing. Selections by random weights
mean nothing, but times depend on them: the shares of kept and recomputed tokens are stored with the
times.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper.settings import DocumentSettings
from keyhole.bench import decode, measure
from keyhole.bench.decode import TOLERANCE
from keyhole.bench.measure import Report, Turn, take_turns
from keyhole.bench.model import Weights, make_weights
from keyhole.bench.settings import PAGE_SIZE, DecodeSettings
from keyhole.config import SamplingParams, require_known
from keyhole.kernels import operations
from keyhole.llm import LLM
from keyhole.reuse import available_reuse_methods, make_reuse

#: The baseline that computes the whole prompt by transformers' attention.
REFERENCE = "transformers_sdpa"
RECOMPUTE = "recompute"

_WARM_UP = 1
_FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def run(settings: DocumentSettings, report: Report) -> dict[str, Any]:
    """Measures every method; returns this benchmark's part of a line of results."""
    for name in settings.methods:
        require_known("method", name, (REFERENCE, *available_reuse_methods()))
    device = measure.device(settings.device)
    bandwidth = measure.read_bandwidth(device)
    length = settings.documents * settings.tokens + settings.question
    asked = DecodeSettings(
        contexts=(-(-length // PAGE_SIZE) * PAGE_SIZE,),
        shape=settings.shape,
        dtype=settings.dtype,
        device=settings.device,
    )
    weights = make_weights(asked)
    generator = torch.Generator().manual_seed(0)
    size = (settings.documents, settings.tokens)
    texts = torch.randint(weights.keyhole.vocab_size, size, generator=generator)
    question = torch.randint(weights.keyhole.vocab_size, (settings.question,), generator=generator)
    prompt = torch.cat([texts.flatten(), question])
    error = _compare(weights, prompt)
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        llm = LLM(weights.keyhole, prefix_cache=False, max_batch=1, documents=folder)
        names = [f"document {i}" for i in range(settings.documents)]
        for name, text in zip(names, texts.tolist(), strict=True):
            llm.documents.add(name, {"prompt_token_ids": text})
        methods: list[_TransformersAnswer | _KeyholeAnswer] = [
            _TransformersAnswer(weights, prompt)
            if name == REFERENCE
            else _KeyholeAnswer(name, llm, names, question)
            for name in settings.methods
        ]
        if settings.hot:
            # With room for the queries, and what else is stored beside keys and values.
            room = 4 * texts.numel() * weights.keyhole.geometry(PAGE_SIZE).token_bytes
            hot = LLM(
                weights.keyhole,
                prefix_cache=False,
                max_batch=1,
                documents=folder,
                hot_document_bytes=room,
            )
            methods += [
                _KeyholeAnswer(name, hot, names, question, as_name=f"{name}_hot")
                for name in settings.hot
            ]
        turns = {method.name: Turn(call=method.call, told_ms=method.told_ms) for method in methods}
        times = take_turns(turns, _WARM_UP + settings.repeat, device)
    results = [
        {
            "context": length,
            "system": method.name,
            "ttft_ms": statistics.median(times[method.name][_WARM_UP:]),
            "all_ttft_ms": times[method.name][_WARM_UP:],
        }
        | method.cost
        for method in methods
    ]
    report(results, [])
    return {
        "settings": asdict(settings),
        "kernels": operations.backend(device),
        "read_bytes_per_s": bandwidth,
        "relative_error": error,
        "results": results,
    }


class _KeyholeAnswer:
    """One of our reuse methods."""

    def __init__(
        self,
        name: str,
        llm: LLM,
        documents: Sequence[str],
        question: Tensor,
        as_name: str | None = None,
    ) -> None:
        self.name = as_name or name
        self.cost: dict[str, Any] = {}
        self._llm, self._documents = llm, list(documents)
        self._question = {"prompt_token_ids": question.tolist()}
        self._reuse = make_reuse(name)
        self._ttft_ms = 0.0

    def call(self) -> None:
        """Answers the question once."""
        stats = self._llm.ask(
            self._question, self._documents, reuse=self._reuse, params=_FIRST_TOKEN
        ).stats
        assert stats.ttft_ms is not None
        self._ttft_ms = stats.ttft_ms
        self.cost = {
            "sequence_ratio": stats.sequence_ratio,
            "recompute_ratio": stats.recompute_ratio,
            "store_bytes_read": stats.store_bytes_read,
        }

    def told_ms(self) -> float:
        """Time from the request to its first token, as measured by the engine."""
        return self._ttft_ms


class _TransformersAnswer:
    """The whole prompt in one forward pass of transformers."""

    name = REFERENCE
    told_ms = None

    def __init__(self, weights: Weights, prompt: Tensor) -> None:
        self.cost = dict.fromkeys(("sequence_ratio", "recompute_ratio", "store_bytes_read"))
        self._weights, self._prompt = weights, prompt

    def call(self) -> None:
        """The most likely next token."""
        _next_logits(self._weights, self._prompt).argmax().item()


@torch.no_grad()
def _next_logits(weights: Weights, prompt: Tensor) -> Tensor:
    """Logits [vocabulary] after a prompt, by transformers with its cache."""
    network = weights.transformers
    network.set_attn_implementation("sdpa")
    tokens = prompt[None].to(weights.keyhole.device)
    logits: Tensor = network(input_ids=tokens, use_cache=True, logits_to_keep=1).logits[0, -1]
    return logits


def _compare(weights: Weights, prompt: Tensor) -> float:
    """The error of our logits after the prompt; DisagreementError if it is too large."""
    engine = LLM(weights.keyhole, prefix_cache=False, max_batch=1).engine
    sequence = engine.add(prompt.tolist(), _FIRST_TOKEN, keep_logits=True)
    while not sequence.is_finished:
        engine.step()
    expected = _next_logits(weights, prompt).float().cpu()
    tolerance = TOLERANCE[weights.keyhole.dtype]
    return decode.check(RECOMPUTE, [sequence.logits[0]], [expected], tolerance)
