"""What requests may ask of an engine: token ids, parameters, and the length that fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from keyhole.cache.layout import Geometry
from keyhole.cache.pages import PageCache
from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.allocation import LayerOffloader, too_long
from keyhole.engine.decode_inputs import page_limit
from keyhole.errors import (
    CapacityError,
    ConfigError,
    PromptTooLongError,
    RequestError,
    UnknownNameError,
)
from keyhole.models.model import Model
from keyhole.policies.base import Policy


class RequestLimits:
    """The limits of one engine for requests; max_length: the most tokens of a sequence."""

    def __init__(
        self,
        model: Model,
        geometry: Geometry,
        config: EngineConfig,
        cache: PageCache,
        offloader: LayerOffloader | None,
        max_length: int,
    ) -> None:
        self._model, self._geometry, self._config = model, geometry, config
        self._cache, self._offloader = cache, offloader
        self._max_length, self._max_pages = max_length, cache.max_pages

    def check(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        policy: Policy,
        *,
        num_given: int = 0,
        stored: bool = False,
    ) -> None:
        """RequestError or CapacityError if a request with these tokens can never be served.

        num_given: how many of the last ones were generated. stored: they are documents, of which
        only a part may be kept.
        """
        model = self._model
        check_tokens(tokens, params, model, self._max_length)
        limit = self._longest(policy, stored=stored)
        if model.rope is not None and len(tokens) >= limit:
            what = "stored documents" if stored else f"policy {policy.name!r}"
            raise PromptTooLongError(
                f"the prompt has {len(tokens)} tokens, but under {what} this model takes at most "
                f"{limit - 1} and one new token ({model.rope.reason})"
            )
        most = self.resolve(params, len(tokens), policy, stored=stored).max_tokens
        assert most is not None
        length = min(len(tokens) + most, self._max_length)
        pages = page_limit(policy, self._geometry, len(tokens) - num_given, length)
        if pages > self._max_pages and not stored:
            length = min(length, pages * self._config.page_size)
            raise CapacityError(too_long(length, self._cache, self._offloader, self._config))

    def resolve(
        self, params: SamplingParams, num_tokens: int, policy: Policy, *, stored: bool
    ) -> SamplingParams:
        """Parameters without None; max_tokens is what model and KV cache have room for.

        num_tokens, stored: of the prompt, as for `check`.
        """
        params = params.resolve(self._model.defaults)
        limit = self._longest(policy, stored=stored)
        if params.max_tokens is not None:
            if limit == self._max_length:
                return params
            return replace(params, max_tokens=max(1, min(params.max_tokens, limit - num_tokens)))
        pages = page_limit(policy, self._geometry, num_tokens, limit)
        room = self._max_pages * self._config.page_size
        longest = limit if pages <= self._max_pages else min(room, limit)
        return replace(params, max_tokens=max(1, longest - num_tokens))

    def _longest(self, policy: Policy, *, stored: bool) -> int:
        """The maximum length under a policy, below `max_length` if its keys are shifted."""
        if self._model.rope is None or not (stored or policy.shifts_keys):
            return self._max_length
        return min(self._max_length, self._model.rope.threshold)


def longest(model: Model, config: EngineConfig) -> int:
    """The maximum length of a sequence. ConfigError for a `max_length` above the model's."""
    if config.max_length is None:
        return model.max_length
    if config.max_length > model.max_length:
        raise ConfigError(
            f"max_length {config.max_length} must be at most {model.max_length}: "
            f"{model.length_reason}"
        )
    return config.max_length


def check_tokens(
    tokens: Sequence[int], params: SamplingParams, model: Model, max_length: int
) -> None:
    """RequestError for tokens or parameters that the model does not support.

    PromptTooLongError if no new token fits below `max_length`; UnknownNameError for a LoRA adapter
    that is not loaded.
    """
    adapter_number(params.adapter, model)
    if not tokens:
        raise RequestError("the prompt is empty; give at least one token")
    wrong = [t for t in tokens if not 0 <= t < model.vocab_size]
    if wrong:
        right = f"0 to {model.vocab_size - 1}"
        raise RequestError(f"token id {wrong[0]} is not one of this model's, {right}")
    if (params.stop or params.bad_words) and model.tokenizer is None:
        name = "stop" if params.stop else "bad_words"
        raise RequestError(f"{name} needs a tokenizer; this model has none", field=name)
    _check_ids("logit_bias", params.logit_bias or (), model.vocab_size)
    # A tokenizer may have more. Counting its ids takes long, so only where it decides.
    beyond = [token for token in params.stop_token_ids if token >= model.vocab_size]
    if beyond:
        count = 0 if model.tokenizer is None else len(model.tokenizer)
        _check_ids("stop_token_ids", beyond, max(model.vocab_size, count))
    if (params.logprobs or 0) > model.vocab_size:
        raise RequestError(
            f"logprobs {params.logprobs} must be at most {model.vocab_size}, the tokens "
            "of this model",
            field="logprobs",
        )
    if len(tokens) >= max_length:
        reason = model.length_reason
        if max_length < model.max_length:
            reason = "set by max_length"
        raise PromptTooLongError(
            f"the prompt has {len(tokens)} tokens, but this model takes at most "
            f"{max_length - 1} and one new token ({reason})"
        )


def _check_ids(name: str, ids: Iterable[int], count: int) -> None:
    wrong = [token for token in ids if token >= count]
    if wrong:
        right = f"0 to {count - 1}"
        message = f"{name}: token id {wrong[0]} is not one of this model's, {right}"
        raise RequestError(message, field=name)


def end_ids(params: SamplingParams, model: Model) -> list[int]:
    """The tokens that end a sequence, of those that the model has scores for."""
    eos = () if params.ignore_eos else model.eos_token_ids
    return [token for token in {*eos, *params.stop_token_ids} if token < model.vocab_size]


def adapter_number(name: str | None, model: Model) -> int:
    """The number of a LoRA adapter, 0 for None. UnknownNameError for one that is not loaded."""
    try:
        return model.adapters.number(name)
    except ValueError:
        raise UnknownNameError("adapter", str(name), model.adapters.digests) from None
