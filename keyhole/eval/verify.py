"""The checks of `keyhole verify`: Keyhole's logits, and the recall of a retrieval head.

Every run of the engine is compared with transformers' eager attention over the same weights and the
same tokens: one request alone, requests of awkward lengths in one batch, a prefill in small chunks,
every token through the decode path, and every policy with a budget that covers the whole length.
Token ids are random (fixed seed), so no tokenizer is needed. Quantised weights round differently
for different numbers of tokens in a call; for them the tolerance is derived from how far the eager
model is from itself when it decodes token by token, or starts from embeddings whose last bits
differ.

Recall is the share of the model's attention weights on the selected tokens in a dense run, a mean
over query tokens, full-attention layers and heads. Sinks and the recent window are part of a
selection and of its budget, as in SpeContext. Two selections need no head:

    window    the first tokens and the newest ones
    best      the tokens with the largest true weights, per KV head and for all layers together:
              the upper bound of one selection for all layers
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import DynamicCache

from keyhole.cache.argument import cache_argument
from keyhole.config import EngineConfig, SamplingParams, is_count, require
from keyhole.engine.engine import Engine
from keyhole.errors import ConfigError
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.policies import available_policies
from keyhole.policies.base import Policy
from keyhole.policies.controls import Full
from keyhole.policies.spe_context import SpeContext
from keyhole.retrieval.gate import SeerGate
from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.training import objectives
from keyhole.retrieval.training.teacher import Teacher, TeacherTargets, attending_by
from keyhole.retrieval.training.training_config import Corpus

#: Largest error allowed, see `Check.error`. Sums in another order cost float32 up to 2e-5 on the
#: families of our tests; every layer rounds to 2^-11 in float16 and to 2^-8 in bfloat16, which came
#: to 0.3 % and 7 % there; a page that is not read came to 28 % and more.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}

#: With quantised weights: this many times the eager model's own noise, at most what bfloat16 may
#: have, so that a page that is not read is still found.
_NOISE = 4.0
_MOST = _TOLERANCE[torch.bfloat16]
#: What a sum of float32 in another order changes, as a share: a few of its last bits.
_REORDERED = 2.0**-20

_PAGE = EngineConfig.page_size
#: One token, a page and its neighbours, and two lengths that are multiples of nothing else here.
_LENGTHS = (1, _PAGE - 1, _PAGE, _PAGE + 1, 63, 111)
_NEW_TOKENS = _PAGE + 1
_CHUNK = 13


@dataclass(frozen=True, kw_only=True)
class Check:
    """One way of running the engine, and the difference of its logits from transformers'.

    difference: largest absolute difference of any logit. error: the value that is judged. In
    float32 it is the difference as a share of the largest logit, if that is above 1. In 16 bits,
    and with quantised weights, a single rounding may send a token to another expert, so the typical
    position counts: per sequence the median over positions of the root mean square difference,
    relative to that of the logits, and of these the worst. same_tokens: share of positions where
    both have the same most likely token. replayed: decode steps that were replayed as CUDA graphs.
    """

    policy: str
    run: str
    difference: float
    error: float
    tolerance: float
    same_tokens: float
    replayed: int

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.error <= self.tolerance


def verify(
    model: Model | str | Path,
    device: str = "auto",
    dtype: str = "auto",
    *,
    length: int | None = None,
) -> list[Check]:
    """Runs all checks; see `Check.passed`. device and dtype as in `LLM`, for a model by name.

    length: also check a prompt of this many tokens, to go beyond a sliding window or to where RoPE
    is scaled. ConfigError if the model does not allow it.
    """
    loaded = model if isinstance(model, Model) else load(model, device, dtype)
    prompts = _prompts(loaded, length)
    short = [prompt for prompt in prompts if len(prompt) <= _LENGTHS[-1]]
    covering = max(map(len, prompts)) + _NEW_TOKENS + _PAGE
    plain, chunked = EngineConfig(), EngineConfig(prefill_chunk=_CHUNK)
    long = EngineConfig(prefill_chunk=_CHUNK if length is None else EngineConfig.prefill_chunk)
    others = [_covers(cls, covering) for cls in available_policies().values() if cls is not Full]
    if loaded.geometry(plain.page_size).index_topk is not None:
        others = []  # the model selects itself
    runs: list[tuple[str, Policy, EngineConfig, list[list[int]], bool]] = [
        ("one request alone", Full(), plain, prompts[-1:], False),
        ("ragged batch", Full(), plain, prompts, False),
        (f"prefill in chunks of {_CHUNK}", Full(), chunked, short, False),
        ("token by token", Full(), plain, short[-1:], True),
        *[("ragged batch", policy, long, prompts, False) for policy in others],
    ]
    eager = Eager(loaded)
    quantised = getattr(loaded.network.config, "quantization_config", None) is not None
    noise = eager.noise(short[-1]) if quantised else None
    checks = []
    for name, policy, config, some, decoded in tqdm(runs, unit="run", disable=None, leave=False):
        found, replayed = _generate(loaded, policy, config, some, decoded=decoded)
        pairs = [(logits, eager.logits(tokens, len(logits))) for tokens, logits in found]
        checks.append(_compare(policy.name, name, pairs, loaded.dtype, noise, replayed))
    return checks


class Eager:
    """The same weights with transformers' eager attention; caches its logits."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[tuple[tuple[int, ...], int], Tensor] = {}

    @torch.no_grad()
    def logits(self, tokens: tuple[int, ...], count: int) -> Tensor:
        """Logits after each of the last `count` tokens, float32 [count, vocabulary] on the host."""
        where = (tokens, count)
        if where not in self._known:
            ids = torch.tensor([tokens], device=self._model.device)
            with attending_by(self._model.network, "eager"):
                out = self._model.network(input_ids=ids, use_cache=False, logits_to_keep=count)
            self._known[where] = out.logits[0].float().cpu()
        return self._known[where]

    @torch.no_grad()
    def noise(self, tokens: list[int]) -> float:
        """Its own rounding noise: the larger of two differences from computing all tokens in one
        call.

        The first is decoding token by token, because layers may round differently for different
        numbers of tokens in a call. The second changes the embeddings by as much as a sum in
        another order would, because layers that round activations amplify that (bitsandbytes rounds
        them to bfloat16 on some CPUs).
        """
        expected = self.logits(tuple(tokens), len(tokens))
        decoded, changed = self._decoded(tokens), self._changed(tokens)
        return max(typical_error(decoded, expected), typical_error(changed, expected))

    def _decoded(self, tokens: list[int]) -> Tensor:
        """Logits [T, vocabulary] of decoding token by token."""
        past, rows = {cache_argument(self._model.network): DynamicCache()}, []
        with attending_by(self._model.network, "eager"):
            for token in tokens:
                ids = torch.tensor([[token]], device=self._model.device)
                out = self._model.network(input_ids=ids, **past, use_cache=True)
                rows.append(out.logits[0, -1].float().cpu())
        return torch.stack(rows)

    def _changed(self, tokens: list[int]) -> Tensor:
        """Logits [T, vocabulary] with slightly changed embeddings."""
        generator = torch.Generator().manual_seed(0)

        def change(module: object, given: object, out: Tensor) -> Tensor:
            off = torch.randn(out.shape, generator=generator).to(out)
            return out * (1 + _REORDERED * off)

        embeddings = self._model.network.get_input_embeddings()
        handle = embeddings.register_forward_hook(change)
        try:
            ids = torch.tensor([tokens], device=self._model.device)
            with attending_by(self._model.network, "eager"):
                out = self._model.network(input_ids=ids, use_cache=False)
        finally:
            handle.remove()
        logits: Tensor = out.logits[0].float().cpu()
        return logits


def _prompts(model: Model, length: int | None) -> list[list[int]]:
    """Random prompts of the awkward lengths that the model allows, and of one more length."""
    generator = torch.Generator().manual_seed(0)
    longest = max(1, model.max_length - _NEW_TOKENS)
    lengths = {min(length, longest) for length in _LENGTHS}
    if length is not None:
        good = is_count(length) and length <= longest
        require(good, "length", length, f"from 1 to {longest}: {model.length_reason}")
        lengths.add(length)
    return [
        torch.randint(model.vocab_size, (count,), generator=generator).tolist()
        for count in sorted(lengths)
    ]


def _covers(cls: type[Policy], budget: int) -> Policy:
    """The policy with a budget that covers everything, and defaults for its other settings."""
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(**({"token_budget": budget} if "token_budget" in names else {}))


def _generate(
    model: Model,
    policy: Policy,
    config: EngineConfig,
    prompts: Sequence[list[int]],
    *,
    decoded: bool,
) -> tuple[list[tuple[tuple[int, ...], Tensor]], int]:
    """Greedy runs: the tokens except the last, the logits after the final ones, and the number of
    replayed steps.

    decoded: all of a prompt but its first token goes through the decode path.
    """
    # With a budget that covers everything, any head or gate must give the same result.
    spare = policy.wants_head and model.head is None
    head = RetrievalHead.random(model.network) if spare else None
    gate = None
    if policy.wants_gate:
        gate = SeerGate.random(model.geometry(config.page_size)).to(model.device, model.dtype)
    engine = Engine(model, policy, config, head=head, gate=gate)
    params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True)
    sequences = [
        engine.add(
            prompt[:1] if decoded else prompt,
            params,
            given=prompt[1:] if decoded else (),
            keep_logits=True,
        )
        for prompt in prompts
    ]
    while engine.has_work:
        engine.step()
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
    found = [(tuple(s.tokens[:-1]), torch.stack(s.logits)) for s in sequences]
    return found, engine.replayed_steps


def _compare(
    policy: str,
    run: str,
    pairs: list[tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    noise: float | None,
    replayed: int,
) -> Check:
    """noise: that of quantised weights, see `Eager.noise`; None for other weights."""
    difference = max(float((ours - right).abs().max()) for ours, right in pairs)
    tolerance = _TOLERANCE[dtype]
    if noise is not None:
        tolerance = max(tolerance, min(_NOISE * noise, _MOST))
    if dtype == torch.float32 and noise is None:
        error = difference / max(1.0, *(float(right.abs().max()) for _, right in pairs))
    else:
        error = max(typical_error(ours, right) for ours, right in pairs)
    same = torch.cat([ours.argmax(-1) == right.argmax(-1) for ours, right in pairs])
    return Check(
        policy=policy,
        run=run,
        difference=difference,
        error=error,
        tolerance=tolerance,
        same_tokens=float(same.double().mean()),
        replayed=replayed,
    )


def typical_error(ours: Tensor, right: Tensor) -> float:
    """Median over positions [T] of the root mean square difference, relative to that of the
    logits.
    """
    places = (ours - right).square().mean(1).sqrt()
    return float(places.median() / right.square().mean().sqrt())


WINDOW, BEST = "window", "best"


@dataclass(frozen=True, kw_only=True)
class RecallText:
    """Token ids, and the positions of the query tokens, ascending."""

    token_ids: list[int]
    rows: list[int]


@dataclass(frozen=True, kw_only=True)
class RecallCell:
    """The recall of one selection in texts of one length.

    recalls: in the order of the texts.
    """

    chooser: str
    length: int
    budget: int
    recalls: tuple[float, ...]

    @property
    def recall(self) -> float:
        """The mean; every text has the same weight."""
        return statistics.fmean(self.recalls)


@torch.no_grad()
def measure_recall(
    model: Model,
    heads: Mapping[str, RetrievalHead],
    texts: Mapping[int, Sequence[RecallText]],
    budgets: Iterable[int],
) -> list[RecallCell]:
    """A cell for each selection, length and smaller budget.

    texts: by length. Works whether or not the model was loaded for the engine.
    """
    geometry = model.geometry(EngineConfig.page_size)
    policies = [SpeContext(token_budget=budget).resolve(geometry) for budget in budgets]
    layers = sorted({layer for head in heads.values() for layer in head.config.feature_layers})
    teacher = Teacher(model.network, tuple(layers))
    found: dict[tuple[str, int, int], list[float]] = {}
    work = [(length, text) for length, some in texts.items() for text in some]
    for length, text in tqdm(work, unit="text", disable=None, leave=False):
        token_ids = torch.tensor(text.token_ids, device=model.device)
        targets = teacher.targets(token_ids, torch.tensor(text.rows, device=model.device))
        hidden = dict(zip(layers, targets.hidden, strict=True))
        scores = {name: _scores(head, targets, hidden) for name, head in heads.items()}
        scores[BEST] = targets.mass
        for policy in (policy for policy in policies if policy.token_budget < length):
            budget, first = policy.token_budget, policy.sink_size
            choices = {
                name: objectives.chosen(of, targets.rows, budget, first, policy.window_size or 1)
                for name, of in scores.items()
            }
            choices[WINDOW] = objectives.recent(targets.rows, budget, first)
            for name, choice in choices.items():
                share = float(objectives.share(targets.mass, choice).mean())
                found.setdefault((name, length, budget), []).append(share)
    return [
        RecallCell(
            chooser=name,
            length=length,
            budget=budget,
            recalls=tuple(round(share, 4) for share in shares),
        )
        for (name, length, budget), shares in found.items()
    ]


def _scores(
    head: RetrievalHead, targets: TeacherTargets, hidden: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """The head's weights per KV head of the target, as logs: [Hkv, R, n]."""
    own = tuple(hidden[layer] for layer in head.config.feature_layers)
    logs = objectives.log_weights(head, dataclasses.replace(targets, hidden=own))
    return objectives.best(logs, len(targets.mass))


HEAD = "head"
RECALL_BUDGETS = (64, 256)
_RECALL_LENGTHS = (512, 1024, 2048)
_TEXTS, _QUERIES = 3, 24


def recall_texts(model: Model, corpus: Corpus) -> dict[int, list[RecallText]]:
    """Texts to measure the recall of the model's head on, by length.

    ConfigError if the model or all texts are too short.
    """
    if model.max_length < _RECALL_LENGTHS[0]:
        raise ConfigError(
            f"the recall of the retrieval head is measured on {_RECALL_LENGTHS[0]} tokens or more, "
            f"but {model.name!r} takes {model.max_length}; leave out --data"
        )
    rng, texts = Random(0), {}
    for length in _RECALL_LENGTHS:
        if length <= model.max_length:
            found = [corpus.text(rng, length) for _ in range(_TEXTS)]
            texts[length] = [_asked(ids) for ids in found if len(ids) > length // 2]
    texts = {length: some for length, some in texts.items() if some}
    if not texts:
        raise ConfigError(
            f"the texts of --data are shorter than {_RECALL_LENGTHS[0] // 2} tokens; give longer "
            "ones"
        )
    return texts


def check_head(
    model: Model, texts: Mapping[int, list[RecallText]]
) -> tuple[RetrievalHead, list[RecallCell]]:
    """The head stored with the model's weights, and its recall next to that of a window."""
    assert model.head is not None
    head = RetrievalHead.from_pretrained(model.head, model.network).to(model.device, model.dtype)
    return head.eval(), measure_recall(model, {HEAD: head}, texts, RECALL_BUDGETS)


def recall_rows(cells: list[RecallCell]) -> list[list[str]]:
    """The length, and for each budget the recall of the head and of the window."""
    found = {(c.chooser, c.budget, c.length): c.recall for c in cells}
    return [
        [
            f"{length:,}",
            *(
                f"{found[HEAD, b, length]:.1%} ({found[WINDOW, b, length]:.1%})"
                if (HEAD, b, length) in found
                else "-"
                for b in RECALL_BUDGETS
            ),
        ]
        for length in sorted({c.length for c in cells})
    ]


def _asked(token_ids: list[int]) -> RecallText:
    """Query tokens spread over the second half, like those of generated text."""
    half, count = len(token_ids) // 2, len(token_ids)
    step = max(1, (count - half) // _QUERIES)
    return RecallText(token_ids=token_ids, rows=list(range(half, count, step)))
