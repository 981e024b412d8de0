"""The bodies of requests: OpenAI's fields, vLLM's additional ones, and our `documents`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictInt,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import PydanticCustomError

from keyhole.config import SamplingParams, require_known
from keyhole.engine.request import PolicySpec
from keyhole.errors import ConfigError, KeyholeError, UnknownNameError
from keyhole.policies import available_policies, make_policy, policy_name
from keyhole.policies.base import Policy
from keyhole.server.chat.prompt import ChatRequest
from keyhole.server.errors import ApiError, concerning

logger = logging.getLogger("keyhole.server")

#: Fields that clients often send and that have no meaning here.
_SILENT = {
    "store",
    "metadata",
    "model",  # of /tokenize
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "stream_options.include_obfuscation",
}
#: Unsupported fields that would change an answer, and the values that leave it unchanged.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "prediction": (),
    "documents": ([],),  # a chat has them
    "reuse": (),
    # Of /v1/responses
    "background": (False,),
    "conversation": (),
    "top_logprobs": (0,),
    # vLLM's
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "continue_final_message": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
#: Those of them that chats have.
_OF_CHATS = {"documents", "reuse"}
_SETTINGS = {field.name for field in dataclasses.fields(SamplingParams)}
_seen: set[str] = set()
#: Limit of remembered unknown names, so that a client that invents names cannot fill the log.
_MOST_SEEN = 1000


def _no_boolean(given: object) -> object:
    if isinstance(given, bool):
        raise PydanticCustomError("boolean", "Input should be a number")
    return given


#: Numbers of a body. In Python true is 1, in JSON it is not a number.
WholeNumber = Annotated[int, BeforeValidator(_no_boolean)]
Number = Annotated[float, BeforeValidator(_no_boolean)]
#: Of a list in a wrong form one error is enough. One for each token of a long prompt takes seconds,
#: in which no client gets anything.
_FIRST_ERROR = Field(fail_fast=True)


class Body(BaseModel):
    """A body that ignores unknown fields, as OpenAI's clients expect.

    unsupported: see `_UNSUPPORTED`.
    """

    model_config = ConfigDict(extra="allow")
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED

    def check_others(self, place: str = "") -> None:
        """ApiError for an unsupported field that changes answers; logs unknown fields once.

        place: prefix of each name, such as "stream_options.".
        """
        for field, value in (self.model_extra or {}).items():
            name = place + field
            if name in self.unsupported:
                if value is not None and value not in self.unsupported[name]:
                    other = "; /v1/chat/completions takes it" if name in _OF_CHATS else ""
                    raise ApiError(400, f"{name} is not supported here{other}", param=name)
            elif name not in _SILENT | _seen and len(_seen) < _MOST_SEEN:
                _seen.add(name)
                logger.warning("unknown request field %.80r is ignored", name)


class StreamOptions(Body):
    """What a stream has besides its pieces."""

    include_usage: bool | None = False


class KeyholeBody(BaseModel):
    """A request's policy by name (None: the server's) and budget, at most the server's.

    timeout: the most seconds that it may take, at most the server's.
    trace: whether the answer lists the tokens that each layer read for every generated token.
    """

    model_config = ConfigDict(extra="forbid")

    policy: str | None = None
    token_budget: WholeNumber | None = Field(None, ge=1)
    timeout: Number | None = Field(None, gt=0, allow_inf_nan=False)
    trace: bool = False


class SamplingBody(Body):
    """Fields of every completion. None: the default; for sampling, that of the model's
    generation_config.

    response_format: text, any JSON object, or JSON of a schema. structured_outputs: vLLM's, an
    object with json, regex, choice or grammar. user: the end user; users take turns.
    keyhole: the request's policy and limits; a string is a policy's name.
    """

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: WholeNumber | None = Field(1, ge=1, le=10_000)  # a server's own limit is lower
    max_tokens: WholeNumber | None = None
    min_tokens: WholeNumber | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: WholeNumber | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[int, Number] | None = None
    bad_words: list[str] | None = None
    seed: WholeNumber | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    user: str | None = None
    keyhole: KeyholeBody | None = None
    prompt_field: ClassVar[str] = "prompt"
    format_field: ClassVar[str] = "response_format"

    @property
    def completions(self) -> int:
        """How many completions each prompt gets."""
        return 1 if self.n is None else self.n

    @field_validator("keyhole", mode="before")
    @classmethod
    def _named(cls, given: object) -> object:
        return {"policy": given} if isinstance(given, str) else given

    def sampling(
        self, logprobs: int | None, grammar: str | None, adapter: str | None
    ) -> SamplingParams:
        """The engine's parameters; ApiError for an invalid value.

        Without `max_tokens`: as many as fit into model and KV cache.
        """
        names = _SETTINGS & set(type(self).model_fields)
        given = {name: getattr(self, name) for name in names - {"logprobs"}}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("top_k") == -1:  # vLLM's value for all
            given["top_k"] = 0
        if self.seed is not None and self.seed < 0:  # as in OpenAI's API, where they have 64 bits
            given["seed"] = self.seed % 2**64
        given.setdefault("max_tokens", None)
        given |= {"logprobs": logprobs, "grammar": grammar, "adapter": adapter}
        try:
            return SamplingParams(**given, trace=self.keyhole is not None and self.keyhole.trace)
        except ConfigError as error:
            name = str(error).partition(" ")[0]
            field = name if name in names else None
            raise ApiError(400, str(error), param=field) from error

    def param(self, error: KeyholeError) -> str | None:
        """The field of this interface that an error of the engine is about."""
        if isinstance(error, UnknownNameError):  # the other names are known by then
            return "documents"
        if error.field != "grammar":
            return self.prompt_field if error.field == "prompt" else error.field
        if self.structured_outputs is not None:
            return "structured_outputs"
        return self.format_field if self.has_format else "tools"

    @property
    def has_format(self) -> bool:
        """Whether the form of the answer is set."""
        return self.response_format is not None and self.response_format.get("type") != "text"

    def policy(self, own: Policy, longest: int) -> PolicySpec | None:
        """The policy that the request names; by default `own`, the server's.

        Only names and budgets: other settings may name files on this machine. ApiError for a
        budget above the server's, or above the longest sequence, as state grows with it.
        """
        asked = self.keyhole
        if asked is None or (asked.policy is None and asked.token_budget is None):
            return None
        budget, most = asked.token_budget, getattr(own, "token_budget", None)
        limit = longest if most is None else most
        if budget is not None and budget > limit:
            whose = "the longest sequence" if most is None else "the server's own"
            raise ApiError(
                400, f"token_budget {budget} must be at most {limit}, {whose}", param="keyhole"
            )
        settings = {} if budget is None else {"token_budget": budget}
        name = None if asked.policy is None else policy_name(asked.policy)
        if name is None or name == own.name:
            return settings or None
        with concerning("keyhole"):
            require_known("policy", name, available_policies())
            made = make_policy(name, settings)
            if budget is None and most is not None and getattr(made, "token_budget", most) > most:
                made = make_policy(name, {"token_budget": most})
            return made

    def check_others(self, place: str = "") -> None:
        """See `Body`."""
        super().check_others(place)
        if self.stream_options is not None:
            self.stream_options.check_others("stream_options.")


class SearchBody(BaseModel):
    """A search for documents. query: None: the user's last message."""

    model_config = ConfigDict(extra="forbid")

    query: str | None = None
    top_k: WholeNumber = Field(8, ge=1, le=100)


class SearchedDocuments(BaseModel):
    """Documents to be found by a search."""

    model_config = ConfigDict(extra="forbid")

    search: SearchBody


def _kind(given: object) -> str:
    """Which of the two forms a value of `documents` has, for errors."""
    return "searched" if isinstance(given, dict | SearchedDocuments) else "names"


_Documents = Annotated[
    Annotated[list[str], Tag("names")] | Annotated[SearchedDocuments, Tag("searched")],
    Discriminator(_kind),
]


class ConversationBody(SamplingBody):
    """Fields of conversations, which a chat template turns into a prompt."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None

    def chat_request(
        self, messages: Sequence[dict[str, Any]], response_format: Mapping[str, Any] | None
    ) -> ChatRequest:
        """The messages of the conversation and the constraints of its reply."""
        return ChatRequest(
            messages=messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            response_format=response_format,
            structured_outputs=self.structured_outputs,
            template_settings=self.chat_template_kwargs,
        )

    def chat_param(self, error: KeyholeError) -> str | None:
        """As `param`, of an error about a conversation that is to become a prompt."""
        return self.prompt_field if error.field in (None, "prompt") else error.field


class ChatBody(ConversationBody):
    """/v1/chat/completions.

    documents: names of stored ones, or a search for them; they are placed before the last message.
    reuse: a method's name, or an object of "method" and its settings. passages: whether the usage
    lists the passages that were kept and recomputed.
    """

    messages: list[dict[str, Any]]
    max_completion_tokens: WholeNumber | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: WholeNumber | None = Field(None, ge=0, le=20)
    documents: _Documents | None = None
    passages: bool = True
    reuse: str | dict[str, Any] | None = None
    prompt_field: ClassVar[str] = "messages"

    def chat_sampling(self, grammar: str | None, adapter: str | None) -> SamplingParams:
        """As `sampling`, by the names that chats use."""
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(logprobs, grammar, adapter)


class CompletionBody(SamplingBody):
    """/v1/completions. prompt: one or several strings, or one or several lists of token ids."""

    prompt: (
        str
        | Annotated[list[str], _FIRST_ERROR]
        | Annotated[list[StrictInt], _FIRST_ERROR]
        | Annotated[list[Annotated[list[StrictInt], _FIRST_ERROR]], _FIRST_ERROR]
    )
    logprobs: WholeNumber | None = Field(None, ge=0, le=20)

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _any_form(cls, given: object, validate: ValidatorFunctionWrapHandler) -> object:
        """One message for all forms, instead of that of the first."""
        try:
            return validate(given)
        except ValidationError as error:
            right = "must be text, token ids, or a list of either"
            raise PydanticCustomError("prompt_type", right) from error

    @property
    def prompts(self) -> list[Any]:
        """The prompts as the engine takes them."""
        given: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if not given:
            raise ApiError(400, "prompt is empty; give at least one token", param="prompt")
        if isinstance(given[0], int):
            given = [given]
        return [one if isinstance(one, str) else {"prompt_token_ids": one} for one in given]


class TokenizeBody(Body):
    """/tokenize: either a prompt, or the messages of a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """/detokenize: token ids."""

    tokens: list[StrictInt]


class DocumentBody(Body):
    """A document. overwrite: replace another text of that name. pinned: never evict it; null keeps
    what it has. metadata: stored with it.
    """

    text: str
    overwrite: bool = True
    pinned: bool | None = None
    metadata: dict[str, Any] | None = None
