"""The papers' headline settings and their targets on a GPU: `make gpu`.

Each is a setting of one of our benchmarks, with random weights of the right shape. A target is a
ratio of speeds within one run: `of` should be at least `wanted` times as fast as `by`.
`benchmarks.paper.setting` measures them, `python -m benchmarks.headlines` is the command, and
docs/results/speed.md lists those that are unmeasured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import command
from benchmarks.kernels.settings import KernelSettings
from benchmarks.offload.loading import ELASTIC, NO_ELASTIC
from benchmarks.offload.settings import OffloadSettings
from keyhole.bench.settings import DTYPES, PAGE_SIZE, SHAPES, DecodeSettings, Names
from keyhole.config import is_count, parse_bytes, require, require_known

#: Systems whose layers are offloaded as sequences grow, and their policies.
OFFLOADED_SYSTEMS = {"spe_context_below": "spe_context"}


@dataclass(frozen=True, kw_only=True)
class ThroughputSettings:
    """Throughput of whole answers, measured with the decode benchmark.

    prompt, answer: tokens of every request. memory: bytes that limit the number of requests.
    host_memory: bytes for offloaded layers of the systems in OFFLOADED_SYSTEMS. points: how many
    lengths along the answer are measured. decode: the rest; its contexts and batch are not used.
    """

    prompt: int
    answer: int
    memory: int
    host_memory: int = 32 << 30
    points: int = 4
    decode: DecodeSettings

    def __post_init__(self) -> None:
        for name in ("prompt", "memory", "host_memory"):
            require(is_count(getattr(self, name)), name, getattr(self, name), "at least 1")
        require(is_count(self.points, 2), "points", self.points, "at least 2")
        least = (self.points - 1) * PAGE_SIZE
        right = f"at least {least}: a page between any two points"
        require(is_count(self.answer, least), "answer", self.answer, right)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Times of single steps, beside the time that the bytes they read take at full bandwidth.

    decode: what is measured. labels: the names of its contexts.
    """

    labels: Names
    decode: DecodeSettings

    def __post_init__(self) -> None:
        count = len(self.decode.contexts)
        require(len(self.labels) == count, "labels", self.labels, f"{count}, one for each context")


@dataclass(frozen=True, kw_only=True)
class DocumentSettings:
    """Time to first token of questions over stored documents of random tokens.

    documents: how many, of `tokens` tokens each; question: tokens after them. methods: reuse
    methods with their defaults, and transformers_sdpa. hot: those of them that are also measured
    with blocks of documents kept on the device (`hot_document_bytes`), as NAME_hot. folder: where
    documents are stored; None: the system's temporary folder.
    """

    methods: Names
    hot: Names = ()
    documents: int = 16
    tokens: int = 1024
    question: int = 64
    repeat: int = 5
    shape: str = "llama-3.1-8b"
    dtype: str = "bfloat16"
    device: str = "auto"
    folder: str | None = None

    def __post_init__(self) -> None:
        for name in ("documents", "tokens", "question", "repeat"):
            require(is_count(getattr(self, name)), name, getattr(self, name), "at least 1")
        require(bool(self.methods), "methods", self.methods, "at least one")
        require_known("shape", self.shape, SHAPES)
        require_known("dtype", self.dtype, DTYPES)


Asked = (
    DecodeSettings
    | StepSettings
    | ThroughputSettings
    | OffloadSettings
    | KernelSettings
    | DocumentSettings
)


@dataclass(frozen=True, kw_only=True)
class SpeedTarget:
    """A target. by: None if `of` is itself a share. paper: the paper's result.

    floor: if `by` is slower than this system, being faster than `by` means nothing.
    """

    of: str
    by: str | None = None
    wanted: float
    paper: str = ""
    floor: str | None = None


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One setting. source: where it is from; about: a description. theirs: peers that are not
    among the settings. note: a remark on its targets in docs/results/speed.md.
    """

    source: str
    about: str
    settings: Asked
    theirs: tuple[str, ...] = ()
    targets: tuple[SpeedTarget, ...]
    note: str = ""


#: The best dense steps of other systems: see `keyhole.bench.settings.MORE_BASELINES`.
FLASH = "torch_flash"
#: Kinds of attention in the kernel benchmark's speeds.
ALL, PAGES, TOKENS = "attend, all", "attend, pages", "attend, tokens per head"


def _table_3(
    prompt: int,
    answer: int,
    memory: str,
    *targets: SpeedTarget,
    more: tuple[str, ...] = (),
    note: str = "",
) -> Headline:
    systems = ("transformers_eager", "transformers_sdpa", FLASH, "full", "spe_context", *more)
    decode = DecodeSettings(
        shape="llama-3.1-8b",
        systems=systems,
        token_budget=2048,
        repeat=5,
    )
    sizes = f"{prompt:,} tokens in, {answer:,} out, requests for {memory}"
    return Headline(
        source="SpeContext, table 3",
        about=f"Llama-3.1-8B, {sizes}, budget 2,048",
        # Two lengths are enough where the sequence hardly grows.
        settings=ThroughputSettings(
            prompt=prompt,
            answer=answer,
            memory=parse_bytes(memory),
            points=2 if answer < prompt else 4,
            decode=decode,
        ),
        targets=targets,
        note=note,
    )


def _kernels(batch: int) -> Headline:
    return Headline(
        source="ours",
        about=f"one layer of Llama-3.1-8B, batch {batch}, 4,096 and 16,384 tokens",
        settings=KernelSettings(
            shape="llama-3.1-8b",
            contexts=(4096, 16384),
            batch=batch,
            ops=("attend", "attend_and_score", "head_scores", "page_bounds", "bound_scores"),
            repeat=21,
        ),
        targets=(
            SpeedTarget(of=ALL, wanted=0.8),
            SpeedTarget(of=PAGES, wanted=0.7),
            SpeedTarget(of=TOKENS, wanted=0.5),
        ),
    )


#: Contexts of one sequence, by their names in the targets.
_CONTEXTS = {"2k": 2048, "32k": 32768, "128k": 131072}
#: A step may take 1.4 times as long as its bytes do at the bandwidth of the same machine.
_OF_BANDWIDTH = 0.714


def step_at(system: str, label: str) -> str:
    """A system at a context, in the speeds of `StepSettings`."""
    return f"{system} at {label}"


def bytes_at(system: str, label: str) -> str:
    """A step that takes no longer than the bytes of this system's step."""
    return f"bytes of {step_at(system, label)}"


def _one_sequence(shape: str, name: str, allowed: str) -> Headline:
    """allowed: what the bytes allow over `full`, in words."""
    policies = ("full", "delta", "spe_context")
    return Headline(
        source="ours",
        about=f"one sequence of {name}, single steps",
        settings=StepSettings(
            labels=tuple(_CONTEXTS),
            decode=DecodeSettings(
                shape=shape,
                contexts=tuple(_CONTEXTS.values()),
                systems=(FLASH, *policies),
                repeat=21,
            ),
        ),
        targets=(
            *(
                SpeedTarget(
                    of=step_at(policy, label), by=bytes_at(policy, label), wanted=_OF_BANDWIDTH
                )
                for label in _CONTEXTS
                for policy in policies
            ),
            *(
                SpeedTarget(of=step_at(policy, label), by=step_at("full", label), wanted=wanted)
                for label, wanted in (("32k", 1.3), ("128k", 2.0))
                for policy in policies[1:]
            ),
        ),
        note="The bytes of a step of one sequence are the weights without an input embedding of "
        "its own, the\nkeys and values that the system reads, and what it reads to select them; "
        "at the bandwidth of a sum\nover a large tensor, measured in the same run. Over `full` the "
        f"bytes allow {allowed}:\nhigher targets are out of reach. The products had two rows of "
        "weights per program; now there are\nfour where the width is a multiple of 1,024, which "
        "was 4 % faster in the layers of the 8B shape.",
    )


def _long_answer(of: str = "spe_context") -> tuple[SpeedTarget, ...]:
    """The paper's own ratios."""
    return (
        SpeedTarget(of=of, by="transformers_eager", wanted=24.89, paper="24.89, 80 GB"),
        SpeedTarget(of=of, by="full", wanted=2.2, paper="2.20 by FlashInfer, 80 GB"),
        SpeedTarget(of=of, by=FLASH, wanted=2.2, paper="2.20 by FlashInfer, 80 GB"),
    )


def _long_prompt(of: str = "spe_context") -> tuple[SpeedTarget, ...]:
    """The paper's own ratios."""
    return (
        SpeedTarget(
            of=of, by="transformers_sdpa", wanted=7.4, paper="7.40 by Flash Attention, 80 GB"
        ),
        SpeedTarget(of=of, by="full", wanted=1.56, paper="1.56 by FlashInfer, 80 GB"),
        SpeedTarget(of=of, by=FLASH, wanted=1.56, paper="1.56 by FlashInfer, 80 GB"),
    )


#: For targets with offloading; without it, only one request fits.
_BELOW = "spe_context_below"

_OF_LONG_PROMPTS = (
    f"For a long prompt the targets are the paper's own ratios of that column "
    f"({_long_prompt()[0].wanted} over Flash Attention,\n{_long_prompt()[1].wanted} over "
    f"FlashInfer), not those of its long answers ({_long_answer()[0].wanted} over eager, "
    f"{_long_answer()[1].wanted}): the paper has\n"
    "no ratio over eager attention there, because eager attention ran out of memory."
)

HEADLINES: dict[str, Headline] = {
    "delta_figure_4": Headline(
        source="DELTA, figure 4",
        about="Qwen2.5-1.5B, batch 64, 18,432 tokens, budget 1,024",
        settings=DecodeSettings(
            shape="qwen2.5-1.5b",
            contexts=(18 * 1024,),
            batch=64,
            systems=("transformers_sdpa", FLASH, "full", "delta"),
            token_budget=1024,
            repeat=21,
        ),
        targets=(
            SpeedTarget(of="delta", by="full", wanted=2.0, paper="1.49, 35 to 28 ms"),
            SpeedTarget(of="delta", by=FLASH, wanted=1.5),
        ),
    ),
    "spe_context_80gb_long_answer": _table_3(2048, 32768, "80GB", *_long_answer()),
    "spe_context_80gb_long_prompt": _table_3(
        32768, 2048, "80GB", *_long_prompt(), note=_OF_LONG_PROMPTS
    ),
    "spe_context_24gb_long_answer": _table_3(
        2048, 32768, "24GB", *_long_answer(_BELOW), more=(_BELOW,)
    ),
    "spe_context_24gb_long_prompt": _table_3(
        32768, 2048, "24GB", *_long_prompt(_BELOW), more=(_BELOW,), note=_OF_LONG_PROMPTS
    ),
    "spe_context_edge": Headline(
        source="SpeContext, figure 10b",
        about="Llama-3.2-1B, 1 sequence of 34,816 tokens, 4 GB for weights and cache, budget 2,048",
        settings=OffloadSettings(
            shape="llama-3.2-1b",
            context=34 * 1024,
            policies=("spe_context",),
            budgets=(2048,),
            memory=parse_bytes("4GB"),
            repeat=51,
        ),
        theirs=("transformers_offloaded", "transformers_eager_offloaded"),
        targets=(
            SpeedTarget(of=ELASTIC, by="transformers_eager_offloaded", wanted=10.06, paper="10.06"),
            SpeedTarget(of=ELASTIC, by="transformers_offloaded", wanted=1.0),
            SpeedTarget(of=ELASTIC, by=NO_ELASTIC, wanted=1.0),
        ),
        note="At 34,816 tokens the head with random weights selects about four of five tokens\n"
        "again at the next step, as in SpeContext's figure 6b.",
    ),
    "kernels": _kernels(64),
    "sam_kv_first_token": Headline(
        source="SamKV, figure 1",
        about="Llama-3.1-8B, 16 documents of 1,024 tokens, a question of 64",
        settings=DocumentSettings(
            methods=("transformers_sdpa", "recompute", "cacheblend", "sam_kv"),
            hot=("sam_kv",),
        ),
        targets=(
            SpeedTarget(of="sam_kv", by="transformers_sdpa", wanted=2.0),
            SpeedTarget(of="sam_kv", by="recompute", wanted=3.0),
            SpeedTarget(of="sam_kv_hot", by="transformers_sdpa", wanted=2.0),
            SpeedTarget(of="sam_kv_hot", by="recompute", wanted=3.0),
            SpeedTarget(of="sam_kv", by="cacheblend", wanted=1.0, floor="recompute"),
        ),
        note="`sam_kv_hot` has the blocks of documents on the device (`hot_document_bytes`); the\n"
        "others read them from the store, which the operating system has in memory. A first token\n"
        "of SamKV took from 471 to 782 ms in five calls.",
    ),
    # The smallest batch that has targets for the kernels' shares.
    "kernels_batch_16": _kernels(16),
    "one_sequence_1b": _one_sequence(
        "llama-3.2-1b",
        "Llama-3.2-1B",
        "1.25 (`delta`) and 1.40 (`spe_context`) at 32k, 1.76 and 2.56 at 128k",
    ),
    "one_sequence_8b": _one_sequence(
        "llama-3.1-8b",
        "Llama-3.1-8B",
        "1.22 (`delta`) and 1.27 (`spe_context`) at 32k, 1.81 and 2.09 at 128k",
    ),
}


def judged(headline: Headline, unit: str, speeds: dict[str, float]) -> list[dict[str, Any]]:
    """The result of every target whose systems were measured."""
    found = []
    for target in headline.targets:
        if target.of not in speeds or (target.by is not None and target.by not in speeds):
            continue
        value = speeds[target.of] / (1.0 if target.by is None else speeds[target.by])
        found.append(command.target(named(target, unit), value, target.wanted))
    return found


def named(target: SpeedTarget, unit: str) -> str:
    """A target in words."""
    return f"{target.of}: {unit}" + ("" if target.by is None else f" by those of {target.by}")
