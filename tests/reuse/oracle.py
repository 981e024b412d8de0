"""The whole way of a question over stored documents, written down once more as plainly as possible.

Nothing here calls keyhole. A prompt is one row of places: prefix, documents (with separators
between them), question, answer. Every layer has one key and one value per place, and a mask that
says which places exist in it. Every stage is then the same thing: some places run through all
layers, read what exists at or before them, and write their keys and values where they may. Stored
keys are not turned: unrotated ones are kept and rotated once, at the place in the prompt.

The settings' names and defaults are those of papers/samkv.txt and of the compared methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from tests.reuse.plain import Network, Prompt, Settings, Stored, among, encode, fusion, overwrite
from tests.reuse.plain_methods import METHODS, Choice


@torch.no_grad()
def ask(
    model: Any,
    documents: Sequence[list[int]],
    prefix: list[int],
    question: list[int],
    method: str,
    *,
    separator: Sequence[int] = (),
    max_new_tokens: int = 4,
    end: int | None = None,
    dtype: torch.dtype = torch.float64,
    records: Sequence[Stored] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Answer a question over documents that are read alone first.

    Gives `logits` of the first answer token, `ids` generated (greedily, until `end`), `kept` and
    `recomputed` bool [L, T] over all documents' tokens, `shares` (SamKV's P per document or
    None), `keys` and `values` [L][kept, Hkv, D] of what was kept, after all updates, `chosen`
    (SamKV, multi_infllm: per layer the (document, block) pairs). cacheblend's `recomputed` has all
    tokens up to its check layer. `records` are the documents already encoded with the same dtype
    and block size.
    """
    assert set(settings) <= {field.name for field in fields(Settings)}, settings
    chosen_settings = Settings(**settings)
    network = Network(model, dtype)
    if records is None:
        records = [encode(network, ids, chosen_settings.block_size) for ids in documents]
    rotate = method != "reuse" or chosen_settings.rotate
    prompt = Prompt(network, records, prefix, question, separator, max_new_tokens, rotate)
    return answer(prompt, METHODS[method](prompt, chosen_settings), chosen_settings, end)


def answer(prompt: Prompt, choice: Choice, settings: Settings, end: int | None) -> dict[str, Any]:
    """Compute again what is to be computed again, read the question, and go on greedily."""
    again = choice.recomputed.any(0)
    prompt.run(
        again | prompt.separators,
        choice.kept | again | prompt.loose,
        choice.recomputed | prompt.separators,
        fusion if settings.update == "fusion" else overwrite,
        choice.revise,
    )
    exists = choice.kept | prompt.loose | prompt.question
    logits, _ = prompt.run(prompt.question, exists, prompt.everywhere(prompt.question))
    first, ids = logits[-1], [int(logits[-1].argmax())]
    place = int(prompt.question.nonzero()[-1])
    while place + 1 < len(prompt.ids) - 1 and ids[-1] != end:
        place += 1
        prompt.ids[place] = ids[-1]
        new = among(len(prompt.ids), [place])
        exists = exists | new
        logits, _ = prompt.run(new, exists, prompt.everywhere(new))
        ids.append(int(logits[-1].argmax()))
    rows = [layer & prompt.documents for layer in choice.kept]
    return {
        "logits": first,
        "ids": ids,
        "kept": choice.kept[:, prompt.documents],
        "recomputed": choice.recomputed[:, prompt.documents],
        "shares": choice.shares,
        "chosen": choice.chosen,
        "keys": [prompt.keys[n][row] for n, row in enumerate(rows)],
        "values": [prompt.values[n][row] for n, row in enumerate(rows)],
    }
