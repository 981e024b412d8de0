"""Settings of benchmarks and shapes of models. No torch: the flags of `keyhole bench` derive from
this.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import SplitResult, urlsplit

from keyhole.config import is_count, is_number, require, require_counts, require_known, setting
from keyhole.errors import ConfigError
from keyhole.policies import available_policies, make_policy, policy_name
from keyhole.registry import is_settings_file, parse, parse_one, written

# Shapes of models, as fields of transformers' configurations; the weights are always random.
#
# A shape is that of a Llama unless `model_type` says otherwise.


SHAPES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("shapes.json").read_text(encoding="utf-8")
)


#: Names in one flag: a,b,c.
Names = tuple[str, ...]

PAGE_SIZE = 16

DTYPES = ("bfloat16", "float16", "float32")
DEVICES = "auto, cpu, cuda or cuda:0"

#: Baselines of the decode benchmark: attention and cache of transformers. The others are compared
#: with the first.
BASELINES = {
    "transformers_sdpa": ("sdpa", "dynamic"),
    "transformers_eager": ("eager", "dynamic"),
    "transformers_static": ("sdpa", "static"),
}

#: Further baselines, measured only if they are named. The first is torch's flash attention over
#: contiguous keys and values that are written in place, the fastest dense step in torch; on a GPU
#: it is replayed as a CUDA graph. So is FlashInfer over pages, where it is installed. The others
#: keep keys and values on the host, and copy one layer ahead.
MORE_BASELINES = {
    "torch_flash": ("in_place", "in_place"),
    "flashinfer": ("in_pages", "in_pages"),
    "transformers_offloaded": ("sdpa", "offloaded"),
    "transformers_eager_offloaded": ("eager", "offloaded"),
}

#: Those of them that need a GPU.
OFFLOADED = tuple(name for name, (_, kind) in MORE_BASELINES.items() if kind == "offloaded")

#: Attention and cache of every baseline that runs in this process.
ALL_BASELINES = BASELINES | MORE_BASELINES

#: Policies that are timed by default.
POLICIES = ("full", "delta", "quest", "spe_context", "streaming_llm")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Settings of all benchmarks; subclasses define the defaults for None."""

    default_shape: ClassVar[str] = "smoke"
    default_repeat: ClassVar[int] = 1

    contexts: tuple[int, ...] = setting(
        (2048, 8192, 32768, 131072),
        f"tokens of a sequence, multiples of {PAGE_SIZE}",
    )
    batch: int = setting(1, "sequences per step")
    repeat: int = setting(
        None,
        "timed calls of each system; None: 11 for decode, 15 for admission",
    )
    shape: str = setting(
        None,
        f"{', '.join(SHAPES)}; None: llama-3.2-1b",
    )
    dtype: str = setting("bfloat16", ", ".join(DTYPES))
    device: str = setting("auto", DEVICES)

    def __post_init__(self) -> None:
        for name, value in (("repeat", self.default_repeat), ("shape", self.default_shape)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        right = f"multiples of {PAGE_SIZE} in ascending order"
        pages = [is_count(n, PAGE_SIZE) and n % PAGE_SIZE == 0 for n in self.contexts]
        good = bool(pages) and all(pages) and sorted(set(self.contexts)) == list(self.contexts)
        require(good, "contexts", self.contexts, right)
        require_counts(self, "batch", "repeat")
        require_known("shape", self.shape, SHAPES)
        require_known("dtype", self.dtype, DTYPES)


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(BenchSettings):
    """The decode benchmark."""

    default_shape: ClassVar[str] = "llama-3.2-1b"
    default_repeat: ClassVar[int] = 11

    systems: Names = setting(  # noqa: RUF009
        (),
        f"{', '.join(BASELINES)}, and policies, also with settings such as "
        "delta:token_budget=512,full_layers=0,1; "
        f"default: these and {', '.join(POLICIES)}; also "
        f"{', '.join(name for name in MORE_BASELINES if name not in OFFLOADED)}, and on a GPU "
        f"{', '.join(OFFLOADED)}",
    )
    token_budget: int | None = setting(
        None,
        "tokens that a policy may read per layer, unless its name sets a token_budget; None: each "
        "policy's default",
    )
    layers: int | None = setting(None, "layers of the model; None: those of the shape")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "systems", specs(self.systems) or (*BASELINES, *POLICIES))
        for name in ("layers", "token_budget"):
            value = getattr(self, name)
            require(value is None or is_count(value), name, value, "a whole number >= 1")


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    """The benchmark of a question over stored documents that arrives while other requests
    decode.
    """

    methods: Names = setting(  # noqa: RUF009
        ("sam_kv", "reuse"), "reuse methods, with settings as in sam_kv:update=fusion"
    )
    documents: int = setting(4, "number of stored documents in the question")
    tokens: int = setting(3000, "tokens of each document, drawn at random")
    question: int = setting(24, "tokens of the question")
    others: int = setting(7, "other requests, which decode in the meantime")
    prompt: int = setting(4000, "tokens of each of the other prompts")
    repeat: int = setting(15, "number of questions, one after another")
    device: str = setting("auto", DEVICES)

    def __post_init__(self) -> None:
        require_counts(self, "documents", "tokens", "question", "others", "prompt", "repeat")
        named = (written(s.name, s.settings) for s in parse(",".join(self.methods)))
        object.__setattr__(self, "methods", tuple(dict.fromkeys(named)))
        require(bool(self.methods), "methods", self.methods, "at least one")


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Load on a running server."""

    device: ClassVar[str] = "cpu"  # of the client, which computes nothing

    url: str = setting("http://127.0.0.1:8000", "address of the server, without /v1")
    requests: int = setting(100, "requests to send")
    concurrency: int | None = setting(
        None, "simultaneous requests; None: 8, or no limit with a rate"
    )
    rate: float | None = setting(
        None, "requests per second, at random moments; None: as soon as another is answered"
    )
    prompt_length: str = setting("256", "tokens per prompt: a number, or a range such as 64-1024")
    answer_length: str = setting("128", "tokens per answer, in the same form")
    lengths: str | None = setting(
        None, "file of JSON lines with prompt_tokens and completion_tokens, instead of these two"
    )
    time_limit: float = setting(600.0, "seconds after which running requests are abandoned")
    goodput_first_ms: float = setting(
        500.0, "longest time to the first token of a request that counts as good"
    )
    goodput_between_ms: float = setting(
        50.0, "longest mean time between the tokens of such a request"
    )
    seed: int = setting(0, "seed of lengths, prompts and arrivals")

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        right = "an address without /v1 such as http://127.0.0.1:8000"
        good = parts.scheme in ("http", "https") and _has_port_or_none(parts)
        require(good and parts.path in ("", "/"), "url", self.url, right)
        require_counts(self, "requests")
        good = self.rate is None or (is_number(self.rate) and self.rate > 0)
        require(good, "rate", self.rate, "a number above 0")
        if self.concurrency is None and self.rate is None:
            object.__setattr__(self, "concurrency", 8)
        good = self.concurrency is None or is_count(self.concurrency)
        require(good, "concurrency", self.concurrency, "a whole number >= 1")
        for name in ("time_limit", "goodput_first_ms", "goodput_between_ms"):
            value = getattr(self, name)
            require(is_number(value) and value > 0, name, value, "a number above 0")
        for name in ("prompt_length", "answer_length"):
            low, high = _range(getattr(self, name))
            right = "a number >= 1, or a range such as 64-1024"
            require(1 <= low <= high, name, getattr(self, name), right)
            usual = getattr(self, name) == type(self).__dataclass_fields__[name].default
            right = f"left out with lengths {self.lengths!r}, which has both"
            require(usual or self.lengths is None, name, getattr(self, name), right)

    @property
    def prompt_range(self) -> tuple[int, int]:
        """Least and most tokens of a prompt."""
        return _range(self.prompt_length)

    @property
    def answer_range(self) -> tuple[int, int]:
        """Least and most tokens of an answer."""
        return _range(self.answer_length)


def _has_port_or_none(address: SplitResult) -> bool:
    """Whether a host is named, with a port that exists or with none."""
    try:
        return bool(address.hostname) and address.port != 0
    except ValueError:  # no number, or one above 65535
        return False


def _range(text: str) -> tuple[int, int]:
    """Both ends; (0, 0) for an invalid range."""
    low, dash, high = text.partition("-")
    if not low.isdecimal() or (dash and not high.isdecimal()):
        return 0, 0
    return int(low), int(high if dash else low)


def specs(names: Iterable[str]) -> Names:
    """Names with their settings, each once, joined again where a comma between two settings split
    them.

    Policies get their canonical names: DELTA becomes delta.
    """
    named = parse(",".join(names))
    return tuple(dict.fromkeys(written(policy_name(s.name), s.settings) for s in named))


def brings_budget(name: str) -> bool:
    """Whether the name of a policy sets a token_budget, or is a settings file."""
    spec = parse_one(name, "policy")
    given = [setting.replace("-", "_") for setting, _ in spec.settings]
    return "token_budget" in given or is_settings_file(spec.name)


def require_systems(names: Iterable[str], others: Collection[str]) -> None:
    """Raises ConfigError for a name that is neither a policy with its settings nor one of the
    others.
    """
    for name in names:
        spec = parse_one(name, "system")
        if not is_settings_file(spec.name):
            require_known("system", spec.name, [*others, *available_policies()])
        if spec.name not in others:
            policy = make_policy(name)
            right = "left out: the benchmark draws the head's weights at random"
            head = getattr(policy, "head", None)
            require(head is None, f"system {name!r}: head", head, right)
            if policy.wants_gate:
                raise ConfigError(f"system {name!r} needs a gate; this benchmark has none")
        elif spec.settings:
            raise ConfigError(f"system {name!r}: {spec.name} has no settings; only policies do")
