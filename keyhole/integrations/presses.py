"""The supported presses, with checked settings and a budget in tokens instead of a ratio.

Supported are the presses that drop whole tokens, the same number for every KV head of every layer,
and whose selection `tests/integrations/press_formulas.py` computes independently:

    snapkv               attention of the last queries (Li et al., SnapKV, NeurIPS 2024)
    observed_attention   attention of all queries, mean (H2O's score, Zhang et al., NeurIPS 2023)
    tova                 attention of the last query (Oren et al., EMNLP 2024)
    expected_attention   attention that future queries would pay (Devoto et al., 2025)
    knorm                small keys (Devoto et al., EMNLP 2024)
    keydiff              keys unlike the mean (Park et al., 2025)
    streaming_llm        first and last tokens (Xiao et al., ICLR 2024)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keyhole.config import is_count, is_number, require, require_known
from keyhole.errors import ConfigError

try:
    from kvpress import (
        DecodingPress,
        ExpectedAttentionPress,
        KeyDiffPress,
        KnormPress,
        ObservedAttentionPress,
        SnapKVPress,
        StreamingLLMPress,
        TOVAPress,
    )
except ImportError as error:
    raise ConfigError(f"this needs kvpress: pip install 'keyhole[kvpress]' ({error})") from error

_RATIO = "compression_ratio"


@dataclass(frozen=True)
class _Offer:
    """A press's class and its properties.

    always: how many tokens it always keeps, or the name of the setting that says so. attention: the
    attention implementation that it needs. decodes: whether it can press again while decoding. The
    others need the queries of more than the newest token, or take indices in the cache for
    positions, which is wrong after a press.
    """

    cls: Any
    always: str | int = 0
    attention: str = "sdpa"
    decodes: bool = False


_OFFERED = {
    "snapkv": _Offer(SnapKVPress, "window_size"),
    "observed_attention": _Offer(ObservedAttentionPress, attention="eager"),
    "tova": _Offer(TOVAPress, 1, decodes=True),
    "expected_attention": _Offer(ExpectedAttentionPress, "n_sink"),
    "knorm": _Offer(KnormPress, decodes=True),
    "keydiff": _Offer(KeyDiffPress, decodes=True),
    "streaming_llm": _Offer(StreamingLLMPress, "n_sink"),
}

_Check = tuple[Callable[[object], bool], str]
_COUNT: _Check = (is_count, "a whole number, at least 1")
_BOOL: _Check = (lambda value: isinstance(value, bool), "true or false")
_RIGHT: dict[str, _Check] = {
    "window_size": _COUNT,
    "kernel_size": (lambda value: is_count(value) and int(str(value)) % 2 == 1, "odd, at least 1"),
    "n_sink": (lambda value: is_count(value, 0), "a whole number, at least 0"),
    "n_future_positions": _COUNT,
    "use_covariance": _BOOL,
    "use_vnorm": _BOOL,
    "epsilon": (lambda value: is_number(value) and float(str(value)) >= 0, "at least 0"),
}
"""Valid values of the settings; kvpress does not check them."""


@dataclass(frozen=True, kw_only=True)
class Press:
    """A press with all its settings, for any number of prompts.

    budget: tokens of a prompt that are kept per KV head. interval: number of generated tokens after
    which the cache is pressed back to the budget; None: all generated tokens are kept.
    """

    name: str
    settings: Mapping[str, Any]
    budget: int
    interval: int | None = None

    @property
    def attention(self) -> str:
        """The attention implementation that it needs, by transformers' name."""
        return _OFFERED[self.name].attention

    @property
    def least(self) -> int:
        """The smallest number of tokens that can be kept: those that are always kept, and one
        selected token.

        With fewer, kvpress 0.5.2 could drop tokens that it should always keep: they share the
        highest score, and it breaks ties arbitrarily.
        """
        always = _OFFERED[self.name].always
        return 1 + int(self.settings[always] if isinstance(always, str) else always)

    def prefill(self, length: int, question: int) -> Any:
        """The press of kvpress for `length` tokens that a question follows; None: keep all.

        The budget includes the question, which is kept whole. Raises ConfigError if it is too small
        for that.
        """
        if length + question <= self.budget:
            return None
        kept = self.budget - question
        if kept < self.least:
            raise ConfigError(
                f"budget {self.budget} must be at least {self.least + question} here: {self.name} "
                f"keeps {self.least} tokens or more, and the question has {question}"
            )
        # kvpress keeps int(length * (1 - ratio)); adding a half makes rounding errors harmless.
        return self._make(1 - (kept + 0.5) / length)

    def decoding(self) -> Any:
        """The press of kvpress for the decode steps of one answer; None: do not press again."""
        if self.interval is None:
            return None
        return DecodingPress(
            base_press=self._make(0.0),
            compression_interval=self.interval,
            target_size=self.budget,
            hidden_states_buffer_size=0,  # these presses look at the newest token at most
        )

    def _make(self, ratio: float) -> Any:
        """Makes a new object for every prompt, because some presses have state."""
        return _OFFERED[self.name].cls(**{_RATIO: ratio}, **self.settings)


def presses() -> tuple[str, ...]:
    """The names of the supported presses."""
    return tuple(_OFFERED)


def make_press(
    name: str,
    budget: int,
    settings: Mapping[str, Any] | None = None,
    interval: int | None = None,
) -> Press:
    """The press of this name; other settings have kvpress's defaults.

    UnknownNameError for an unknown name or setting, ConfigError for an invalid value.
    """
    require_known("press", name, _OFFERED)
    offer = _OFFERED[name]
    known = {f.name: f.default for f in dataclasses.fields(offer.cls) if f.name != _RATIO}
    for one, value in (settings or {}).items():
        require_known(f"setting of press {name}", one, known)
        good, right = _RIGHT[one]
        require(good(value), f"{name}:{one}", value, right)
    press = Press(
        name=name, settings=known | dict(settings or {}), budget=budget, interval=interval
    )
    right = f"a whole number of tokens, at least {press.least} for {name}"
    require(is_count(budget, press.least), "budget", budget, right)
    require(interval is None or is_count(interval), "interval", interval, "at least 1")
    if interval is not None and not offer.decodes:
        able = ", ".join(sorted(one for one, other in _OFFERED.items() if other.decodes))
        raise ConfigError(f"press {name} cannot compress again while decoding; these can: {able}")
    return press
