"""What `keyhole verify` says of a retrieval head: its recall against length, on a few texts."""

from __future__ import annotations

from random import Random

from keyhole.errors import ConfigError
from keyhole.eval.head_recall import WINDOW, RecallCell, RecallText, measure
from keyhole.models.loading import Model
from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.training.training_config import Corpus

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
