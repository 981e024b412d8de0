"""What works together: every policy, kind of model, tier of keys, and way to a prompt.

    python -m tests.combinations    # runs every cell, writes the table into docs/methods.md

A cell runs three ragged requests side by side, on a small random model. It works if with a budget
above the length its logits are those of full attention, and if with a small budget each request
gets what it gets alone and, where layers are offloaded, what it gets without. Else it must
be refused with an error of ours; anything else is a failure.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks import reference_pages
from keyhole import LLM, SamplingParams, sparse
from keyhole.engine.documents.prompt import assemble
from keyhole.errors import KeyholeError
from keyhole.models.model import Model
from keyhole.policies import available_policies, make_policy
from keyhole.policies.base import Policy
from keyhole.reuse import available_reuse_methods, make_reuse
from tests.checkpoints import PAD, make_model
from tests.policies.models import VOCAB, prompt, with_head

PAGE_OF_METHODS = "docs/methods.md"
_DEEP = {"num_hidden_layers": 6, "vocab_size": VOCAB, "max_position_embeddings": 512}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 3}
#: Kinds of models, by what a reader of the table knows them as.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "MHA": ("llama_mha", _DEEP),
    "GQA": ("llama_group3", _DEEP),
    "MQA": ("llama_mqa", _DEEP),
    "MLA": ("deepseek_v3", _DEEP),
    "windows": ("gemma3", _DEEP | _MIXED),
    "softcap": ("gemma2", _DEEP | _MIXED),
    "sinks": ("gpt_oss", _DEEP | _MIXED),
    "learned positions": ("gpt_bigcode", {"n_layer": 6, "vocab_size": VOCAB}),
}
PAGE, COUNT = 4, 8
#: None: an ordinary prompt, "sparse": transformers' generate, others: reuse methods.
PLAIN, SPARSE = "prompt", "keyhole.sparse"
WAYS = (PLAIN, SPARSE, *available_reuse_methods())
SMALL, LARGE = {"token_budget": 16}, {"token_budget": 192}
REQUESTS = (prompt(9), prompt(90), prompt(33))
DOCUMENTS = {"a": prompt(37, 1), "b": prompt(18, 1), "c": prompt(29, 1)}
ASKED = ((("a", "b"), prompt(5, 2)), (("c",), prompt(3, 2)), (("b", "c", "a"), prompt(8, 2)))


@dataclass(frozen=True)
class Cell:
    """One combination; lower: some layers are offloaded."""

    policy: str
    family: str
    way: str = PLAIN
    lower: bool = False


def cells() -> list[Cell]:
    """All of them."""
    every = itertools.product(available_policies(), FAMILIES, WAYS, (False, True))
    return [Cell(*parts) for parts in every if parts[2:] != (SPARSE, True)]


def covering(chosen: Iterable[Cell]) -> list[Cell]:
    """Few of them that have every pair of values which stands in one of them."""
    pairs, found = {cell: _pairs(cell) for cell in chosen}, []
    missing = set().union(*pairs.values())
    while missing:
        best = max(pairs, key=lambda cell: len(missing & pairs[cell]))
        missing -= pairs[best]
        found.append(best)
    return found


def _pairs(cell: Cell) -> set[tuple[tuple[str, Any], ...]]:
    return set(itertools.combinations(dataclasses.asdict(cell).items(), 2))


class Lab:
    """Runs cells; models, stored documents and dense results are made once.

    settings: of every engine, besides those of the cell.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._folder = folder
        self._settings = settings
        self.model = functools.cache(self._model)
        self.dense = functools.cache(self._dense)

    def outcome(self, cell: Cell) -> str | None:
        """None if the cell works, else the text of the error that refuses it.

        AssertionError if it gives wrong numbers.
        """
        try:
            large = None if cell.lower else self.logits(cell, LARGE, range(3))
            small = self.logits(cell, SMALL, range(3))
        except KeyholeError as error:
            return str(error)
        for ours, dense in zip(large or (), self.dense(cell.family, cell.way), strict=bool(large)):
            _same(ours, dense)
        if cell.lower:
            alone = self.logits(dataclasses.replace(cell, lower=False), SMALL, range(3))
        else:
            alone = [self.logits(cell, SMALL, [i])[0] for i in range(3)]
        for one, other in zip(small, alone, strict=True):
            _same(one, other)
        return None

    def logits(self, cell: Cell, settings: dict[str, int], rows: Iterable[int]) -> list[Tensor]:
        """[COUNT, vocabulary] of every request."""
        cls = available_policies()[cell.policy]
        names = {field.name for field in dataclasses.fields(cls)}
        policy = make_policy(cell.policy, {k: v for k, v in settings.items() if k in names})
        if cell.way == SPARSE:
            return self._generated(cell, policy, list(rows))
        with tempfile.TemporaryDirectory(dir=self._folder) as lower:
            settings: dict[str, Any] = {
                "page_size": PAGE,
                "max_batch": 3,
                "prefill_chunk": 64,
                "documents": self._folder / f"{cell.family}.store",
            }
            settings |= self._settings
            model = self.model(cell.family)
            if cell.lower:
                roomy = LLM(model, policy, memory="1GiB", offload=lower, **settings)
                memory = _memory(roomy, stored=cell.way in available_reuse_methods())
                settings |= {"memory": memory, "offload": lower}
            llm = LLM(model, policy, **settings)
            if cell.lower:
                _offload_layer(llm)
            return self._answers(llm, cell, rows)

    def _answers(self, llm: LLM, cell: Cell, rows: Iterable[int]) -> list[Tensor]:
        params = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
        with ExitStack() as stack:
            requests = []
            for row in rows:
                tokens, context = REQUESTS[row], None
                if cell.way != PLAIN:
                    names, question = ASKED[row]
                    for name in names:
                        ids = {"prompt_token_ids": DOCUMENTS[name]}
                        llm.documents.add(name, ids, block_size=PAGE)
                    method = _reuse(cell.way).resolve(llm.engine.geometry)
                    asked = {"prompt_token_ids": question}
                    made = assemble(llm.engine, llm.documents, names, asked, method, stack)
                    tokens, context = made.tokens, made.context
                requests.append(llm.engine.add(tokens, params, context=context, keep_logits=True))
            while llm.engine.has_work:
                llm.engine.step()
        for request in requests:
            if request.error is not None:
                raise request.error
        llm.engine.check_integrity()
        return [torch.stack(request.logits) for request in requests]

    def _generated(self, cell: Cell, policy: Policy, rows: list[int]) -> list[Tensor]:
        network = self.model(cell.family).network
        texts = [REQUESTS[row] for row in rows]
        longest = max(map(len, texts))
        ids = torch.tensor([[PAD] * (longest - len(text)) + text for text in texts])
        options = {"max_new_tokens": COUNT, "min_new_tokens": COUNT, "do_sample": False}
        with sparse(network, policy, page_size=PAGE):
            out = network.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=(ids != PAD).long(),
                return_dict_in_generate=True,
                output_logits=True,
                **options,
            )
        return list(torch.stack(out.logits, 1))

    def _model(self, family: str) -> Model:
        kind, fields = FAMILIES[family]
        path = make_model(kind, self._folder, **fields)
        return with_head(path)

    def _dense(self, family: str, way: str) -> list[Tensor]:
        return self.logits(Cell("full", family, way), {}, range(3))


def _reuse(name: str) -> Any:
    cls = available_reuse_methods()[name]
    small = {"block_size": PAGE, "num_initial": 6, "num_local": 6, "num_blocks": 2}
    names = {field.name for field in dataclasses.fields(cls)}
    return make_reuse(name, {k: v for k, v in small.items() if k in names})


def _same(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape
    assert (one - other).abs().max() <= 1e-4 * max(1.0, other.abs().max().item())


def _memory(roomy: LLM, *, stored: bool) -> int:
    """The least memory that holds all requests, with any number of layers offloaded."""
    assert roomy.engine.offloader is not None
    lengths = [*map(len, REQUESTS)]
    if stored:
        lengths = [sum(len(DOCUMENTS[n]) for n in names) + len(text) for names, text in ASKED]
    pages = sum(-(-(length + COUNT) // PAGE) for length in lengths)
    model = roomy.engine.offloader.plan.model
    # Where a choice per query head makes buffers larger than what they replace, most are too many.
    return max(model.cache_bytes(pages, below) for below in range(1, len(model.order) + 1))


def _offload_layer(llm: LLM) -> None:
    """Offloads a layer before anything runs: reduced documents might leave room for all of them."""
    offloader = llm.engine.offloader
    assert offloader is not None
    offloader.offload_layer(1)
    offloader.least = 1
    assert offloader.offloaded == 1


def render(found: dict[Cell, str | None]) -> str:
    """The table: a row per policy, what is refused by which families' names, reasons below."""
    columns: dict[str, Callable[[Cell], bool]] = {
        "prompt": lambda cell: cell.way == PLAIN and not cell.lower,
        "offloaded": lambda cell: cell.way == PLAIN and cell.lower,
        "`keyhole.sparse`": lambda cell: cell.way == SPARSE,
        "stored documents": lambda cell: cell.way in available_reuse_methods() and not cell.lower,
        "stored documents, offloaded": lambda cell: (
            cell.way in available_reuse_methods() and cell.lower
        ),
    }
    reasons: list[str] = []
    rows = []
    for name in available_policies():
        texts = []
        for chosen in columns.values():
            mine = {c: why for c, why in found.items() if c.policy == name and chosen(c)}
            texts.append(_text(mine, reasons))
        rows.append(f"| `{name}` | {' | '.join(texts)} |")
    head = f"| policy | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}"
    notes = [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join([head, *rows, "", *notes])


def _text(found: dict[Cell, str | None], reasons: list[str]) -> str:
    """Of one place in the table."""
    refused: dict[int, set[str]] = {}
    for cell, why in found.items():
        if why is not None:
            reason = _reason(why, cell)
            if reason not in reasons:
                reasons.append(reason)
            way = "" if cell.way in (PLAIN, SPARSE) else cell.way
            refused.setdefault(reasons.index(reason) + 1, set()).add(f"{cell.family}/{way}")
    parts = []
    for number, places in refused.items():
        families = [f for f in FAMILIES if any(place.startswith(f + "/") for place in places)]
        ways = [
            way
            for way in available_reuse_methods()
            if any(place.endswith("/" + way) for place in places)
        ]
        others = set.union(set(), *(other for n, other in refused.items() if n != number))
        rest = set(FAMILIES) - {place.partition("/")[0] for place in others}
        most = rest <= set(families) and 2 * len(families) > len(FAMILIES)
        where = "" if most else f" {', '.join(families)}"
        which = (
            "" if len(ways) in (0, len(available_reuse_methods())) else f" with {', '.join(ways)}"
        )
        parts.append(f"not{where}{which} ({number})")
    return "; ".join(parts) or "yes"


def _reason(text: str, cell: Cell) -> str:
    """The error without the names of this cell."""
    text = re.sub(r"model '[^']*': the family '[^']*'", "the model: its family", text)
    text = text.replace(f"reuse method {cell.way!r}", "the reuse method")
    return text.replace(f"policy {cell.policy!r}", "the policy")


def main() -> None:
    """Runs every cell, which takes minutes, and writes the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))
        found = {cell: lab.outcome(cell) for cell in tqdm(cells(), unit="cell")}
    path = Path(__file__).parents[1] / PAGE_OF_METHODS
    path.write_text(reference_pages.with_combinations(path.read_text(), render(found)))
    print(f"written: {PAGE_OF_METHODS}, {len(found)} combinations")


if __name__ == "__main__":
    main()
