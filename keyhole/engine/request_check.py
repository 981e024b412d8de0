"""What a model can be asked for: refused before anything runs, with the value and what is right."""

from __future__ import annotations

from collections.abc import Sequence

from keyhole.config import EngineConfig, SamplingParams
from keyhole.errors import ConfigError, PromptTooLongError, RequestError
from keyhole.models.loading import Model


def longest(model: Model, config: EngineConfig) -> int:
    """The most tokens of a sequence. ConfigError for a `max_length` above the model's."""
    if config.max_length is None:
        return model.max_length
    if config.max_length > model.max_length:
        raise ConfigError(
            f"max_length {config.max_length} is more than {model.max_length}: {model.length_reason}"
        )
    return config.max_length


def check_tokens(
    tokens: Sequence[int], params: SamplingParams, model: Model, max_length: int
) -> None:
    """RequestError for tokens or parameters that the model cannot have.

    PromptTooLongError if no new token fits below `max_length`.
    """
    if not tokens:
        raise RequestError("the prompt is empty; give at least one token")
    wrong = [t for t in tokens if not 0 <= t < model.vocab_size]
    if wrong:
        right = f"0 to {model.vocab_size - 1}"
        raise RequestError(f"token id {wrong[0]} is not one of this model's, {right}")
    if (params.stop or params.bad_words) and model.tokenizer is None:
        raise RequestError("stop texts and bad words need a tokenizer; this model has none")
    wrong = [t for t in params.logit_bias or () if t >= model.vocab_size]
    if wrong:
        right = f"0 to {model.vocab_size - 1}"
        raise RequestError(f"logit_bias: token id {wrong[0]} is not one of this model's, {right}")
    if (params.logprobs or 0) > model.vocab_size:
        raise RequestError(
            f"logprobs {params.logprobs} must be at most {model.vocab_size}, the tokens "
            "of this model"
        )
    if len(tokens) >= max_length:
        reason = model.length_reason
        if max_length < model.max_length:
            reason = "set by max_length"
        raise PromptTooLongError(
            f"the prompt has {len(tokens)} tokens, this model takes at most "
            f"{max_length - 1} and one new token ({reason})"
        )
