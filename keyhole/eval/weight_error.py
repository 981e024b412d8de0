"""The error of packing a model's weights, for `keyhole verify --weights`.

The model with its weights as stored and the packed one read the same texts with transformers' eager
attention. Without --data, texts are sampled from the model as stored: the packed model's perplexity
on them shows how far it is from that model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.engine import Engine
from keyhole.eval.verify import Eager, typical_error
from keyhole.models.model import Model
from keyhole.policies.controls import Full
from keyhole.retrieval.training.training_config import Corpus

#: Texts, and the most tokens of each: enough to tell 1 % of perplexity on ordinary text.
_TEXTS, _LENGTH = 8, 256


@dataclass(frozen=True, kw_only=True)
class WeightError:
    """The packed model compared with the model as stored.

    perplexity, plain_perplexity: of the texts, packed and as stored. logit_error: per text the
    median over positions of the root mean square difference of the logits, relative to that of the
    logits; the worst of the texts. divergence: mean Kullback-Leibler divergence of the next token's
    distribution, in nats. same_tokens: share of positions with the same most likely token. tokens:
    that were predicted. source: of the texts.
    """

    perplexity: float
    plain_perplexity: float
    logit_error: float
    divergence: float
    same_tokens: float
    tokens: int
    source: str

    @property
    def change(self) -> float:
        """The increase of the perplexity, as a share of that of the model as stored."""
        return self.perplexity / self.plain_perplexity - 1


@dataclass(frozen=True)
class PlainRun:
    """Texts, and the logits [T, vocabulary] of the model as stored after each of their tokens."""

    texts: list[tuple[int, ...]]
    logits: list[Tensor]
    source: str


def plain_run(model: Model, corpus: Corpus | None) -> PlainRun:
    """The texts of a corpus, or texts that the model samples, and its logits."""
    length = min(_LENGTH, model.max_length)
    if corpus is None:
        texts, source = _sampled(model, length), "texts that the model as stored sampled"
    else:
        rng = Random(0)
        texts = [tuple(corpus.text(rng, length)) for _ in range(_TEXTS)]
        source = corpus.name
    return PlainRun(texts, _logits(model, texts), source)


def weight_error(plain: PlainRun, packed: Model) -> WeightError:
    """Compares a packed model with the run of the model as stored."""
    logits = _logits(packed, plain.texts)
    losses: dict[str, list[Tensor]] = {"plain": [], "packed": []}
    divergences, same, errors = [], [], []
    for text, was, now in zip(plain.texts, plain.logits, logits, strict=True):
        logs = {"plain": was.log_softmax(-1), "packed": now.log_softmax(-1)}
        following = torch.tensor(text[1:])[:, None]
        for name, log in logs.items():
            losses[name].append(-log[:-1].gather(1, following))
        divergences.append((logs["plain"].exp() * (logs["plain"] - logs["packed"])).sum(-1))
        same.append(was.argmax(-1) == now.argmax(-1))
        errors.append(typical_error(now, was))
    perplexity = {name: float(torch.cat(loss).mean().exp()) for name, loss in losses.items()}
    return WeightError(
        perplexity=perplexity["packed"],
        plain_perplexity=perplexity["plain"],
        logit_error=max(errors),
        divergence=float(torch.cat(divergences).mean()),
        same_tokens=float(torch.cat(same).double().mean()),
        tokens=sum(len(text) - 1 for text in plain.texts),
        source=plain.source,
    )


def _logits(model: Model, texts: Sequence[tuple[int, ...]]) -> list[Tensor]:
    eager = Eager(model)
    return [eager.logits(text, len(text)) for text in texts]


def _sampled(model: Model, length: int) -> list[tuple[int, ...]]:
    """Texts of the model itself, at temperature 1, each after one random token."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(model.vocab_size, (_TEXTS,), generator=generator).tolist()
    engine = Engine(model, Full(), EngineConfig(max_batch=_TEXTS))
    sequences = []
    for seed, token in enumerate(first):
        params = SamplingParams(max_tokens=length - 1, temperature=1.0, seed=seed, ignore_eos=True)
        sequences.append(engine.add([token], params))
    while engine.has_work:
        engine.step()
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
    return [tuple(sequence.tokens) for sequence in sequences]
