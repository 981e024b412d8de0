"""How much of a model's attention a retrieval head finds, against budget and length.

Recall is the share of the model's attention weights that falls on the chosen tokens, a mean over
query tokens, full-attention layers and heads, on a dense run. Sinks and the recent window are part
of a choice and of its budget, as in SpeContext. Beside the heads stand two that need none:

    window    the first tokens and the newest ones
    best      the tokens that truly have most, per KV head and for all layers alike: what one choice
              for all layers cannot exceed

What `keyhole verify` says of a retrieval head: its recall against length, on a few texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch
from tqdm.auto import tqdm

from keyhole.config import EngineConfig
from keyhole.errors import ConfigError
from keyhole.models.loading import Model
from keyhole.policies.spe_context import SpeContext
from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.training import objectives
from keyhole.retrieval.training.teacher import Teacher, TeacherTargets
from keyhole.retrieval.training.training_config import Corpus

WINDOW, BEST = "window", "best"


@dataclass(frozen=True, kw_only=True)
class RecallText:
    """Token ids, and the query tokens that are asked: places in them, ascending."""

    token_ids: list[int]
    rows: list[int]


@dataclass(frozen=True, kw_only=True)
class RecallCell:
    """Mean recall of one chooser over some texts of one length."""

    chooser: str
    length: int
    budget: int
    recall: float
    texts: int


@torch.no_grad()
def measure(
    model: Model,
    heads: Mapping[str, RetrievalHead],
    texts: Mapping[int, Sequence[RecallText]],
    budgets: Iterable[int],
) -> list[RecallCell]:
    """A cell for each chooser, length and smaller budget; each text counts alike.

    texts: by the length that they stand for. The model may be loaded for the engine or not.
    """
    geometry = model.geometry(EngineConfig.page_size)
    policies = [SpeContext(token_budget=budget).resolve(geometry) for budget in budgets]
    layers = sorted({layer for head in heads.values() for layer in head.config.feature_layers})
    teacher = Teacher(model.network, tuple(layers))
    found: dict[tuple[str, int, int], list[float]] = {}
    work = [(length, text) for length, some in texts.items() for text in some]
    for length, text in tqdm(work, unit="text", disable=None, leave=False):
        token_ids = torch.tensor(text.token_ids, device=model.device)
        lesson = teacher.lesson(token_ids, torch.tensor(text.rows, device=model.device))
        hidden = dict(zip(layers, lesson.hidden, strict=True))
        scores = {name: _scores(head, lesson, hidden) for name, head in heads.items()}
        scores[BEST] = lesson.mass
        for policy in (policy for policy in policies if policy.token_budget < length):
            budget, first = policy.token_budget, policy.sink_size
            choices = {
                name: objectives.chosen(of, lesson.rows, budget, first, policy.window_size or 1)
                for name, of in scores.items()
            }
            choices[WINDOW] = objectives.recent(lesson.rows, budget, first)
            for name, choice in choices.items():
                share = float(objectives.share(lesson.mass, choice).mean())
                found.setdefault((name, length, budget), []).append(share)
    return [
        RecallCell(
            chooser=name,
            length=length,
            budget=budget,
            recall=round(sum(shares) / len(shares), 4),
            texts=len(shares),
        )
        for (name, length, budget), shares in found.items()
    ]


def _scores(
    head: RetrievalHead, lesson: TeacherTargets, hidden: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """The head's weights per KV head of the target, as logs: [Hkv, R, n]."""
    own = tuple(hidden[layer] for layer in head.config.feature_layers)
    logs = objectives.log_weights(head, dataclasses.replace(lesson, hidden=own))
    return objectives.best(logs, len(lesson.mass))


HEAD = "head"
BUDGETS = (64, 256)
_LENGTHS = (512, 1024, 2048)
_TEXTS, _QUERIES = 3, 24


def check_head(model: Model, corpus: Corpus) -> tuple[RetrievalHead, list[RecallCell]]:
    """The head beside the model's weights, and its recall beside that of a window.

    ConfigError if the texts are all shorter than what is to be chosen among.
    """
    assert model.head is not None
    head = RetrievalHead.from_pretrained(model.head, model.network).to(model.device, model.dtype)
    rng, texts = Random(0), {}
    for length in _LENGTHS:
        if length <= model.max_length:
            found = [corpus.text(rng, length) for _ in range(_TEXTS)]
            texts[length] = [_asked(ids) for ids in found if len(ids) > length // 2]
    texts = {length: some for length, some in texts.items() if some}
    if not texts:
        raise ConfigError(
            f"the texts of --data are shorter than {_LENGTHS[0] // 2} tokens; give longer ones"
        )
    return head.eval(), measure(model, {HEAD: head}, texts, BUDGETS)


def rows(cells: list[RecallCell]) -> list[list[str]]:
    """Length, and for each budget the recall of the head and of the window."""
    found = {(c.chooser, c.budget, c.length): c.recall for c in cells}
    return [
        [
            f"{length:,}",
            *(
                f"{found[HEAD, b, length]:.1%} ({found[WINDOW, b, length]:.1%})"
                if (HEAD, b, length) in found
                else "-"
                for b in BUDGETS
            ),
        ]
        for length in sorted({c.length for c in cells})
    ]


def _asked(token_ids: list[int]) -> RecallText:
    """The query tokens are spread over the second half, as those of generated text are."""
    half, count = len(token_ids) // 2, len(token_ids)
    step = max(1, (count - half) // _QUERIES)
    return RecallText(token_ids=token_ids, rows=list(range(half, count, step)))
