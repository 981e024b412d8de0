"""`LLM`: prompts in, results out, over the engine."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Several
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from keyhole.config import EngineConfig, SamplingParams, parse_bytes, require
from keyhole.documents.source import place_of
from keyhole.documents.store import require_check
from keyhole.engine.documents.library import Documents
from keyhole.engine.documents.prompt import assemble
from keyhole.engine.engine import Engine
from keyhole.engine.request import PolicySpec, RequestPolicy
from keyhole.engine.sequence import Piece, Result, Sequence, piece_of, result_of
from keyhole.errors import ConfigError, RequestError
from keyhole.exactness_gate import load_exact
from keyhole.models.device_map import DeviceMap
from keyhole.models.locate import Origin
from keyhole.models.model import Model
from keyhole.policies import make_policy
from keyhole.policies.base import Policy
from keyhole.registry import require_depth
from keyhole.reuse import make_reuse
from keyhole.reuse.base import Reuse
from keyhole.tokenization import (
    Message,
    Prompt,
    Prompts,
    Tool,
    chat_text,
    encode_text,
    given_ids,
    one_or_several,
)

#: How to choose tokens: for all prompts, or for each.
Params = SamplingParams | Several[SamplingParams] | None

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


def arguments_of(
    method: Callable[Concatenate[Any, _Given], object],
) -> Callable[[Callable[..., _Returned]], Callable[Concatenate[Any, _Given], _Returned]]:
    """A decorator that gives a method the arguments of another, which it receives by name.

    Type checkers and `help` show them; TypeError at the call for an argument that `method` lacks.
    """
    signature = inspect.signature(method)

    def decorate(own: Callable[..., _Returned]) -> Callable[Concatenate[Any, _Given], _Returned]:
        @functools.wraps(own)
        def call(self: Any, /, *given: _Given.args, **named: _Given.kwargs) -> _Returned:
            arguments = signature.bind(self, *given, **named).arguments
            arguments.pop(next(iter(signature.parameters)))
            return own(self, **arguments)

        returned = inspect.signature(own).return_annotation
        call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return call

    return decorate


class LLM:
    """A language model that reads, at each step, only what its policy selects.

    It can be called from several threads: calls take turns step by step, and the requests of all
    threads run in one batch. `AsyncLLM` is the same for asyncio.

    Args:
        model: A folder, a name on the Hugging Face hub, a GGUF file, "tiny" (the bundled
            demonstration model), a model loaded by transformers, which is not changed, or a model
            from `keyhole.models.loading.load`. Loaded models share their weights.
        policy: An object such as `Delta(token_budget=1024)`, text such as
            "delta:token_budget=1024", the path of a settings file written by
            `keyhole eval --suite paper`, or None for dense attention.
        revision: A branch, tag or commit of a model on the hub; None: its main branch.
        subfolder: The folder inside the model's folder or hub id in which its files are.
        trust_remote_code: Whether Python files of the model run, for a family that transformers
            does not have. They can do anything that you can.
        tokenizer: An object, or its folder or name; by default the model's own. A model loaded by
            transformers has none.
        device: "auto", "cpu", "cuda", "cuda:0", or a torch device.
        device_map: For a model larger than one GPU: "auto" spreads its layers over all GPUs; a
            mapping has the device of each module that it names, {"": "cuda:0", "model.layers.20":
            "cuda:1"}. Instead of `device`.
        dtype: "auto" (that of the checkpoint), "float32", "bfloat16", "float16", or a torch dtype.
        weights: "int4" or "int8": pack the weights of linear layers while loading, on a CPU; a
            group size may follow, "int4:group_size=32". "dequantised": a GGUF file's blocks as
            plain numbers. None: as they are stored.
        adapters: Folders of LoRA adapters, by name. A request chooses one by
            `SamplingParams(adapter="name")`; those of one step may have different ones.
        memory: Most bytes of the KV cache, as a number or text such as "2GiB"; by default most of
            the free memory.
        total_memory: In place of `memory`, most bytes of weights, KV cache and the tensors of a
            step together, as `keyhole plan` counts them.
        offload: A folder for layers that do not fit; on a GPU any value offloads them to RAM. They
            return when there is room. Results do not change.
        max_batch: Most requests in a step.
        page_size: Tokens in a page of the KV cache.
        prefill_chunk: Most prompt tokens in a step.
        prefill_policy: What the tokens of long prompts read, such as "xattention:mass=0.95": blocks
            of keys that hold this share of the attention, by estimate. Prompts are then not exact.
            None: everything.
        prefix_cache: Whether the start that prompts share is computed only once; a folder in which
            it survives a restart.
        prefix_store: That folder by itself, as settings files and the command line name it.
        prefix_store_bytes: The most bytes that prefixes may take in that folder.
        max_prefill_share: Of a step's prompt tokens, the most that one prompt takes while others
            wait.
        graphs: Whether decode steps on a GPU are repeated as CUDA graphs, where possible.
        max_length: Most tokens of a sequence; by default the model's limit.
        draft: What proposes tokens that one step checks together: "ngram" (what followed the newest
            tokens where they occurred before), "eagle3" (the draft model next to the weights),
            "eagle3:FOLDER" (another one), or None. Results do not change, except under SpeContext
            with a draft model, which then selects for proposed tokens by its own output.
        num_draft_tokens: Most proposed tokens of a request in a step.
        kv_dtype: How keys and values are stored: "int8" or "fp8" in 8 bits, each key and value of a
            head with a scale of its own, which halves their memory; "auto": as the model computes.
        documents: Where stored documents are: a folder, or a URL that fsspec supports; by default
            in the user's cache folder.
        documents_limit: Most bytes that they may take there, as a number or text.
        documents_check: When stored keys and values are compared with checksums: "open" only what
            is read when a document is opened, "read" everything that is read later, too.
        hot_document_bytes: Most bytes, as a number or text, that keys and values of stored
            documents which were read last take of `memory`, on the model's device; None: none.
        host_document_bytes: With hot_document_bytes, most bytes of the host's memory (pinned beside
            a GPU), for the blocks that leave the device; None: none.

    Raises:
        ModelError: The model is missing, damaged or not supported.
        ConfigError: A setting is invalid, or cannot be used with the model or the policy.
        CapacityError: The model does not fit into memory.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel | Model,
        policy: Policy | str | Path | None = None,
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        trust_remote_code: bool = False,
        tokenizer: Any = None,
        device: str | torch.device = "auto",
        device_map: DeviceMap = None,
        dtype: str | torch.dtype = "auto",
        weights: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        memory: int | str | None = None,
        total_memory: int | str | None = None,
        offload: str | Path | None = None,
        max_batch: int = EngineConfig.max_batch,
        page_size: int = EngineConfig.page_size,
        prefill_chunk: int = EngineConfig.prefill_chunk,
        prefill_policy: str | None = None,
        prefix_cache: bool | str | Path = EngineConfig.prefix_cache,
        prefix_store: str | Path | None = None,
        prefix_store_bytes: int | str | None = None,
        max_prefill_share: float = EngineConfig.max_prefill_share,
        graphs: bool = EngineConfig.graphs,
        max_length: int | None = None,
        draft: str | None = None,
        num_draft_tokens: int = EngineConfig.num_draft_tokens,
        kv_dtype: str = EngineConfig.kv_dtype,
        documents: str | Path | None = None,
        documents_limit: int | str | None = None,
        documents_check: str = "open",
        hot_document_bytes: int | str | None = None,
        host_document_bytes: int | str | None = None,
    ) -> None:
        require_check(documents_check, "documents_check")
        documents = place_of(documents)
        good = prefix_store is None or isinstance(prefix_store, str | Path)
        require(good, "prefix_store", prefix_store, "a folder")
        if not isinstance(prefix_cache, bool):
            good = isinstance(prefix_cache, str | Path) and prefix_cache != ""
            require(good, "prefix_cache", prefix_cache, "True, False or a folder")
            right = f"left out, because prefix_cache={str(prefix_cache)!r} also names a folder"
            require(prefix_store is None, "prefix_store", prefix_store, right)
            prefix_store, prefix_cache = prefix_cache, True
        config = EngineConfig(
            max_batch=max_batch,
            page_size=page_size,
            prefill_chunk=prefill_chunk,
            prefill_policy=prefill_policy,
            prefix_cache=prefix_cache,
            prefix_store=None if prefix_store is None else str(prefix_store),
            prefix_store_bytes=_bytes(prefix_store_bytes, "prefix_store_bytes"),
            max_prefill_share=max_prefill_share,
            memory=_bytes(memory, "memory"),
            total_memory=_bytes(total_memory, "total_memory"),
            offload=None if offload is None else str(offload),
            graphs=graphs,
            max_length=max_length,
            draft=draft,
            num_draft_tokens=num_draft_tokens,
            kv_dtype=kv_dtype,
            hot_document_bytes=_bytes(hot_document_bytes, "hot_document_bytes"),
            host_document_bytes=_bytes(host_document_bytes, "host_document_bytes"),
        )
        chosen = make_policy(policy)
        origin = Origin(revision, subfolder, trust_remote_code)
        loaded = load_exact(model, tokenizer, device, dtype, weights, adapters, device_map, origin)
        require_depth(policy, loaded.geometry(page_size).num_layers)
        self.engine = Engine(loaded, chosen, config)
        self._documents: dict[str | None, Documents] = {}
        self._store = documents, _bytes(documents_limit, "documents_limit"), documents_check

    def __repr__(self) -> str:
        model, cache = self.engine.model, self.engine.cache
        number, tokens = str(model.dtype).removeprefix("torch."), cache.max_pages * cache.page_size
        return (
            f"LLM({model.name!r}, {self.policy!r}: {number} on {model.device}, KV cache for "
            f"{tokens:,} tokens)"
        )

    @property
    def policy(self) -> Policy:
        """The policy in use, every "auto" settled."""
        return self.engine.policy

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, None if it has none."""
        return self.engine.model.tokenizer

    @overload  # a text is also an iterable of texts
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: Params = None, *, policy: PolicySpec | None = None
    ) -> Result: ...
    @overload
    def generate(
        self, prompts: Iterable[Prompt], params: Params = None, *, policy: PolicySpec | None = None
    ) -> list[Result]: ...
    def generate(
        self, prompts: Prompts, params: Params = None, *, policy: PolicySpec | None = None
    ) -> Result | list[Result]:
        """One Result for one prompt, a list of Results for a list of prompts.

        A prompt is text, a list of token ids, or {"prompt_token_ids": [...]}; a list may mix them.
        params: for all prompts, or a list with one for each. All prompts are checked before the
        first one runs. An interrupt frees all of them.
        policy: for this call, instead of the policy of the LLM: an object, a name or a settings
        file, or a dict of settings of the LLM's policy that differ, {"token_budget": 512}. Requests
        of different policies run in the same steps. ConfigError for one that needs more of the KV
        cache than the policy of the LLM. The other methods take it as well.
        """
        alone, wanted = one_or_several(prompts)
        each = params_for(params, len(wanted))
        with self.engine.lock:
            under = self.engine.under(policy)
            tokens = [self.tokens(prompt) for prompt in wanted]
            for one, settings in zip(tokens, each, strict=True):
                self.engine.limits.check(one, settings, under.policy)
            groups = [self._add(*one, under) for one in zip(tokens, each, strict=True)]
        finished = iter(self._finish([sequence for group in groups for sequence in group]))
        results = [Result.of_all([next(finished) for _ in group]) for group in groups]
        return results[0] if alone else results

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        policy: PolicySpec | None = None,
    ) -> Iterator[Piece]:
        """Yields text as it is generated; leaving the loop early frees the request."""
        return self._stream(self.submit(prompt, params, policy=policy))

    def chat(
        self,
        messages: Several[Message],
        params: SamplingParams | None = None,
        *,
        tools: Several[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reuse_generated: bool = False,
        policy: PolicySpec | None = None,
    ) -> Result:
        """The next message of a conversation, by the model's chat template.

        messages: "role" and "content" each, which is text or a list of parts of text. tools: what
        the model may call, for the template. chat_template_kwargs: what else it knows, such as
        {"enable_thinking": False}; others are refused.
        reuse_generated: keep what a sparse policy wrote while it generated the earlier answers,
        instead of computing them again exactly. A dense policy always keeps it.
        """
        with self.engine.lock:
            under = self.engine.under(policy)
            tokens = self._chat_tokens(messages, tools, chat_template_kwargs)
            sequences = self._add(tokens, _params(params), under, reuse_generated=reuse_generated)
        return Result.of_all(self._finish(sequences))

    @arguments_of(chat)
    def stream_chat(self, **arguments: Any) -> Iterator[Piece]:
        """Streams the answer of `chat`."""
        return self._stream(self.submit_chat(**arguments))

    @functools.cached_property
    def documents(self) -> Documents:
        """The stored documents: add, get, list, remove, verify.

        ConfigError for a model whose positions cannot be shifted.
        """
        return self.documents_with(None)

    def documents_with(self, adapter: str | None) -> Documents:
        """The stored documents as a LoRA adapter encodes them, in the same place; None: no adapter.

        A question with that adapter uses these; they must be added here.
        """
        known = self._documents.get(adapter)
        if known is None:
            known = self._documents[adapter] = Documents(self.engine, *self._store, adapter)
        return known

    def ask(
        self,
        question: Prompt,
        documents: Several[str],
        *,
        reuse: Reuse | str | Path | None = None,
        params: SamplingParams | None = None,
        prefix: Prompt = "",
        separator: Prompt = "",
        chat: bool = False,
        policy: PolicySpec | None = None,
    ) -> Result:
        """An answer from stored documents, which are placed between the prefix and the question.

        documents: names, in order; a name may occur twice. reuse: what to keep of them and to
        compute again, an object such as `SamKV(update="fusion")`, a name, a settings file, or None
        (SamKV). separator: between two documents. chat: prefix, documents and question make the
        user's message of the model's chat template.

        UnknownNameError for a name that is not stored, with the nearest one.
        """
        with ExitStack() as stack:
            sequence = self.submit_ask(
                stack,
                question,
                documents,
                reuse=reuse,
                params=params,
                prefix=prefix,
                separator=separator,
                chat=chat,
                policy=policy,
            )
            return self._finish([sequence])[0]

    @arguments_of(ask)
    def stream_ask(self, **arguments: Any) -> Iterator[Piece]:
        """Streams the answer of `ask`."""
        with ExitStack() as stack:
            sequence = self.submit_ask(stack, **arguments)
            return self._stream(sequence, stack.pop_all())

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        after: Sequence | None = None,
        policy: PolicySpec | None = None,
        caller: str = "",
    ) -> Sequence:
        """Queues a request without running it, for callers that run `engine.step` themselves.

        after: a request with the same prompt, whose computation this one waits for and shares.
        caller: whose request it is; those of several callers take turns.
        """
        with self.engine.lock:
            under = self.engine.under(policy)
            tokens = self.tokens(prompt)
            return self.engine.add(tokens, _single(params), after=after, under=under, caller=caller)

    def submit_chat(
        self,
        messages: Several[Message],
        params: SamplingParams | None = None,
        *,
        tools: Several[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reuse_generated: bool = False,
        after: Sequence | None = None,
        policy: PolicySpec | None = None,
    ) -> Sequence:
        """`submit` for `chat`."""
        with self.engine.lock:
            under = self.engine.under(policy)
            tokens = self._chat_tokens(messages, tools, chat_template_kwargs)
            return self.engine.add(
                tokens,
                _single(params),
                reuse_approximate=reuse_generated,
                after=after,
                under=under,
            )

    def submit_ask(
        self,
        stack: ExitStack,
        question: Prompt,
        documents: Several[str],
        *,
        reuse: Reuse | str | Path | None = None,
        params: SamplingParams | None = None,
        prefix: Prompt = "",
        separator: Prompt = "",
        chat: bool = False,
        policy: PolicySpec | None = None,
        caller: str = "",
    ) -> Sequence:
        """`submit` for `ask`; the documents are open until `stack` is closed."""
        method = make_reuse(reuse).resolve(self.engine.geometry)
        with self.engine.lock:
            under = self.engine.under(policy)
            stored = self.documents_with(_single(params).adapter)
        asked = assemble(
            self.engine,
            stored,
            documents,
            question,
            method,
            stack,
            prefix=prefix,
            separator=separator,
            chat=chat,
        )
        with self.engine.lock:
            return self.engine.add(
                asked.tokens, _single(params), context=asked.context, under=under, caller=caller
            )

    def _add(
        self,
        tokens: list[int],
        params: SamplingParams,
        under: RequestPolicy,
        *,
        reuse_generated: bool = False,
    ) -> list[Sequence]:
        """Queues a prompt `n` times; the later ones wait for the first one's computation."""
        group: list[Sequence] = []
        for one in params.each():
            after = group[0] if group else None
            group.append(
                self.engine.add(
                    tokens, one, reuse_approximate=reuse_generated, after=after, under=under
                )
            )
        return group

    def _finish(self, sequences: list[Sequence]) -> list[Result]:
        left = set(sequences)
        try:
            with tqdm(total=len(left), unit="request", disable=len(left) < 2 or None) as bar:
                while left:
                    with self.engine.lock:
                        # Steps of other threads may have finished some.
                        if not any(sequence.is_finished for sequence in left):
                            self.engine.step()
                        done = {sequence for sequence in left if sequence.is_finished}
                    left -= done
                    bar.update(len(done))
        finally:
            self._abort(left)
        return [result_of(sequence) for sequence in sequences]

    def _stream(self, sequence: Sequence, opened: ExitStack | None = None) -> Iterator[Piece]:
        """The pieces of a request, which is freed with them; `opened` is closed then."""

        def free() -> None:
            self.engine.abort(sequence)
            if opened is not None:
                opened.close()

        end = functools.partial(self.engine.lock.defer, free)
        pieces = self._pieces(sequence, end)
        # None of a generator's own code runs if nobody iterates over it.
        weakref.finalize(pieces, end).atexit = False
        return pieces

    def _pieces(self, sequence: Sequence, end: Callable[[], None]) -> Iterator[Piece]:
        given, done = 0, False
        try:
            while not done:
                with self.engine.lock:
                    # A step of another stream may have brought something.
                    if not sequence.is_finished and sequence.num_generated == given:
                        self.engine.step()
                    piece = piece_of(sequence, given)
                if piece is not None:
                    given += len(piece.token_ids)
                    done = piece.result is not None
                    yield piece
        finally:
            end()

    def _abort(self, sequences: Iterable[Sequence]) -> None:
        with self.engine.lock:
            for sequence in sequences:
                self.engine.abort(sequence)

    def tokens(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; RequestError for anything else, and for an empty one."""
        if (ids := given_ids("a prompt", prompt)) is not None:
            return ids
        assert isinstance(prompt, str)
        return self._encode(prompt, special=True)

    def _chat_tokens(
        self,
        messages: Several[Message],
        tools: Several[Tool] | None,
        settings: Mapping[str, Any] | None,
    ) -> list[int]:
        return self._encode(chat_text(self.tokenizer, messages, tools, settings), special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        if self.tokenizer is not None and not text.strip():
            raise RequestError("the prompt is empty; give at least one word", field="prompt")
        return encode_text(self.tokenizer, text, special=special)


def _bytes(value: int | str | None, name: str) -> int | None:
    return None if value is None else parse_bytes(value, name)


def params_for(params: Params, count: int) -> list[SamplingParams]:
    """The settings of each of `count` prompts. ConfigError for a list of another length."""
    if params is None or isinstance(params, SamplingParams):
        return [_params(params)] * count
    if not isinstance(params, Several):
        return [_params(params)]
    if len(params) != count:
        raise ConfigError(
            f"params has {len(params)} entries for {count} prompts; give one SamplingParams for "
            "all prompts, or one for each"
        )
    return [_params(one) for one in params]


def _single(params: SamplingParams | None) -> SamplingParams:
    """The settings of a request that gives one completion."""
    given = _params(params)
    if given.n != 1:
        raise RequestError(
            f"n {given.n} must be 1 here; only generate and chat return several completions"
        )
    return given


def _params(params: object) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"params must be a SamplingParams, not {type(params).__name__}")
    return params
