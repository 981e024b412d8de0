"""Measures the effect of each difference between our reuse methods and the authors' code.

    python -m benchmarks.reuse_differences [--items 100] [--groups cacheblend ...]

Each sample has two short documents of the bundled model's world and a question; each variant
answers the same questions as the first of its group, Keyhole's default except where its name says
otherwise. The code is plain PyTorch in float32, `tests/reuse/published.py`, and tested against the
engine's answers. Each group adds a line to benchmarks/results/reuse-differences.jsonl with every
answer's correctness and the relative error of the first answer token's logits against a fully
computed prompt, and prints shares with Wilson intervals, McNemar's exact test against the first
variant, and median errors. Seeds count from 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import benchmarks
import keyhole
from benchmarks import command
from keyhole.eval.comparisons import gain, wilson
from keyhole.eval.tiny_language.documents import DocumentItem, exact_match, make
from tests.reuse import oracle, plain, plain_methods, published

_BLOCK, _SHAPE = 16, (2, 320)
_LONGEST = 16
# InfLLM's local window; it places everything beyond at this distance.
_FAR = 4096


class Network(plain.Network):
    """The plain network with torch's attention, because a loop over heads is slow."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """[T, Hq, D], as in the plain network."""
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)


@dataclass
class DifferenceCase:
    """A question; what several variants need is computed once."""

    network: Network
    tokenizer: Any
    item: DocumentItem
    made: dict[Any, Any] = field(default_factory=dict)

    @property
    def parts(self) -> list[list[int]]:
        """Prefix, documents and question; only the first begins with <bos>."""
        texts = [*self.item.documents, self.item.question]
        ids = [self.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        return [self.tokenizer(self.item.prefix).input_ids, *ids]

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make`, computed at the first call."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def alone(self, first: int | None = None) -> published.Chunks:
        """The parts, each encoded separately."""
        found: published.Chunks = self.once(
            ("alone", first), lambda: published.read_alone(self.network, self.parts, first)
        )
        return found

    def judged(self, ids: Sequence[int], logits: Tensor) -> tuple[int, float]:
        """Whether these tokens are the right answer, and the error of the first token's logits."""
        whole = self.once("whole", self._whole)
        error = float((logits - whole).norm() / whole.norm())
        return int(exact_match(self.item, self.tokenizer.decode(ids))), error

    def _whole(self) -> Tensor:
        """Logits after the prompt without reuse."""
        chunks = self.alone()
        return published.cacheblend(
            self.network, chunks, number=0, suffix=len(chunks.ids), lower_right=False
        )[2]


#: Correctness and error of an answer.
Variant = Callable[[DifferenceCase], tuple[int, float]]


def cacheblend(
    *, bos: bool = False, share: float | Sequence[float] = 0.15, whole: bool = True, **settings: Any
) -> Variant:
    """Keyhole's CacheBlend, except for the given settings.

    whole: the whole question is computed, not only its last token. bos: documents are encoded after
    the BOS token, which is then dropped.
    """

    def answer(case: DifferenceCase) -> tuple[int, float]:
        chunks = case.alone(case.tokenizer.bos_token_id if bos else None)
        suffix = chunks.question if whole else 1
        among = len(chunks.ids) - chunks.starts[1] - suffix
        shares = [share] if isinstance(share, float | int) else share
        number = [math.ceil(part * among) for part in shares]
        usual: dict[str, Any] = {"lower_right": False, "number": number, "suffix": suffix}
        keys, values, logits, _ = published.cacheblend(case.network, chunks, **usual | settings)
        ids = published.generate(case.network, keys, values, logits, _LONGEST)
        return case.judged(ids, logits)

    return answer


def epic(initial: int, local: int = 0, *, bos: bool = False) -> Variant:
    """EPIC; bos: each document keeps the BOS token."""

    def answer(case: DifferenceCase) -> tuple[int, float]:
        chunks = case.alone()
        if bos:
            prefix, *documents, question = case.parts
            first = case.tokenizer.bos_token_id
            parts = [prefix, *([first, *document] for document in documents), question]
            chunks = published.read_alone(case.network, parts)
        keys, values, logits, _ = published.epic(case.network, chunks, initial, local)
        ids = published.generate(case.network, keys, values, logits, _LONGEST)
        return case.judged(ids, logits)

    return answer


def by_plan(plan: Callable[..., plain_methods.Choice], **settings: Any) -> Variant:
    """A selection of blocks by `plan` from the prompt and these settings."""

    def answer(case: DifferenceCase) -> tuple[int, float]:
        prefix, *documents, question = case.parts
        records = case.once(
            "records", lambda: [plain.encode(case.network, ids, _BLOCK) for ids in documents]
        )
        prompt = plain.Prompt(case.network, records, prefix, question, [], _LONGEST, True)
        asked = plain.Settings(block_size=_BLOCK, local_tokens=_FAR, **settings)
        end = case.tokenizer.eos_token_id
        found = oracle.answer(prompt, plan(prompt, asked), asked, end)
        return case.judged(found["ids"], found["logits"])

    return answer


#: 15 % in the mean of four layers, like the paper's set, which shrinks from layer to layer.
_SHRINKING = (0.19, 0.17, 0.13, 0.11)

#: Kind of question and variants; the others are compared with the first.
GROUPS: dict[str, tuple[str, dict[str, Variant]]] = {
    "cacheblend at layer 1": (
        "needs_each_other/anywhere",
        {
            "by value": cacheblend(),
            "by key": cacheblend(deviation="key"),
            "by both": cacheblend(deviation="both"),
            "16 %": cacheblend(share=0.16),
            "mask to the lower right": cacheblend(lower_right=True),
            "the question competes": cacheblend(whole=False),
            "only the chosen are new": cacheblend(all_new=False),
            "a set that shrinks": cacheblend(share=_SHRINKING),
            "read after <bos>": cacheblend(bos=True),
        },
    ),
    "cacheblend at layer 2": (
        "needs_each_other/anywhere",
        {
            "by value": cacheblend(check=2),
            "by key": cacheblend(check=2, deviation="key"),
            "by both": cacheblend(check=2, deviation="both"),
            "16 %": cacheblend(check=2, share=0.16),
            "mask to the lower right": cacheblend(check=2, lower_right=True),
            "the question competes": cacheblend(check=2, whole=False),
            "only the chosen are new": cacheblend(check=2, all_new=False),
            "a set that shrinks": cacheblend(check=2, share=_SHRINKING),
            "read after <bos>": cacheblend(check=2, bos=True),
        },
    ),
    "epic": (
        "needs_each_other/ends",
        {
            "32 first": epic(32),
            "16 first": epic(16),
            "8 first": epic(8),
            "2 first": epic(2),
            "32 first, 32 last": epic(32, 32),
            "32 first, <bos> kept": epic(32, bos=True),
        },
    ),
    "multi_infllm": (
        "one/anywhere",
        {
            "one representative": by_plan(plain_methods.multi_infllm, num_blocks=3),
            "four": by_plan(partial(published.multi_infllm, one_distance=False), num_blocks=3),
            "four, one distance": by_plan(published.multi_infllm, num_blocks=3),
        },
    ),
    "sam_kv": (
        "one/anywhere",
        {
            "offered blocks / documents": by_plan(plain_methods.sam_kv),
            "all blocks / documents": by_plan(plain_methods.sam_kv, pooled=False),
            "deviations over the chosen": by_plan(plain_methods.sam_kv, over_chosen=True),
        },
    ),
}


def main() -> None:
    """Reads the command line, measures and stores."""
    parser = command.parser(__doc__)
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--groups", nargs="+", default=GROUPS, choices=GROUPS, metavar="GROUP")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(keyhole.tiny(), attn_implementation="eager")
    network = Network(model, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(keyhole.tiny())
    for group in arguments.groups:
        name = "reuse-differences"
        line = command.header(name, "benchmarks.reuse_differences", arguments.note)
        line |= {"group": group, "kind": GROUPS[group][0]}
        line["results"] = count(network, tokenizer, group, arguments.items)
        benchmarks.append(benchmarks.results() / f"{name}.jsonl", line)
        print(report(line), flush=True)


@torch.no_grad()
def count(network: Network, tokenizer: Any, group: str, items: int) -> list[dict[str, Any]]:
    """Per variant of a group, which of the first items it answers correctly, and its errors."""
    kind, variants = GROUPS[group]
    question, where = kind.split("/")
    number, words = _SHAPE
    found: list[dict[str, Any]] = [{"variant": v, "right": [], "errors": []} for v in variants]
    for seed in tqdm(range(items), desc=group, disable=None):
        item = make(question, where=where, num_documents=number, words=words, seed=seed)
        case = DifferenceCase(network, tokenizer, item)
        for result, variant in zip(found, variants.values(), strict=True):
            right, error = variant(case)
            result["right"].append(right)
            result["errors"].append(float(f"{error:.3g}"))
    return found


def report(line: dict[str, Any]) -> str:
    """Describes a group's shares and errors, each compared with the first."""
    first = line["results"][0]
    rows = [f"{line['group']}, {len(first['right'])} questions"]
    for result in line["results"]:
        right = result["right"]
        low, high = wilson(sum(right), len(right))
        more = gain(right, first["right"])
        rows.append(
            f"  {result['variant']:28} {sum(right) / len(right):6.1%} ({low:.1%} to {high:.1%})  "
            f"+{more.better} -{more.worse}, p {more.p:.2g}; error "
            f"{statistics.median(result['errors']):.3g}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
