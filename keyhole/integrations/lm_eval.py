"""The model "keyhole" of lm-evaluation-harness: its tasks under any policy.

    python -m keyhole.integrations.lm_eval --model keyhole --tasks gsm8k
        --model_args pretrained=MODEL,policy=delta,token_budget=1024

This imports the module, which registers the model, and runs the harness's own command line; the
harness has no entry points for models of other packages. In a program, import this module and call
`lm_eval.simple_evaluate(model="keyhole", ...)`.

Tokens, truncation, stop strings and chat template are those of the harness's model "hf", and with
`policy=full` the answers are, too. Log-likelihoods are computed in float32, as in `hf` with
`softmax_dtype=float32`.

What a sparse policy changes, in each kind of request (the context is always computed exactly):

    generate_until          every generated token after the first is decoded under the policy.
    loglikelihood           the continuation is decoded under the policy, token by token. Its first
                            token is predicted by the exact context, so that a choice between
                            continuations of one token (A, B, C, D) is the same under every policy.
    loglikelihood_rolling   a window begins with one token and the rest is decoded under the policy:
                            perplexity through the decode path, which takes a step per token.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from keyhole.config import EngineConfig, SamplingParams, is_count, require
from keyhole.engine.sequence import Sequence as Request
from keyhole.errors import (
    ConfigError,
    KeyholeError,
    ModelError,
    RequestError,
    UnknownNameError,
    first_line,
)
from keyhole.llm import LLM
from keyhole.models.loading import load
from keyhole.models.model import Model
from keyhole.policies import make_policy

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ConfigError(
        f"this needs lm-evaluation-harness: pip install 'keyhole[lm-eval]' ({error})"
    ) from error

_ENGINE = tuple(field.name for field in dataclasses.fields(EngineConfig))
#: Supported fields of a task's generation_kwargs, besides those that the harness itself reads.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
#: Replaces logits that have been used: thousands of them would not fit in memory.
_READ = torch.empty(0)


class KeyholeLM(TemplateLM):  # type: ignore[misc]
    """A model of the harness that answers through Keyhole's engine, many requests at once.

    pretrained: a folder, a hub id, or a model from `keyhole.models.loading.load`. policy: a name;
    its settings, and those of `EngineConfig`, are keyword arguments. batch_size: as in the harness;
    with 1 (its default) and "auto", max_batch applies. Other arguments are as in the model "hf".

    ModelError for the model, ConfigError for settings.
    """

    def __init__(
        self,
        pretrained: str | Model,
        policy: str | None = None,
        *,
        tokenizer: str | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        max_length: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str = "auto",
        dtype: str = "auto",
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        own = {name: settings.pop(name) for name in _ENGINE if name in settings}
        own.setdefault("max_batch", _batch(batch_size, max_batch_size))
        chosen = make_policy(policy)
        names = [field.name for field in dataclasses.fields(chosen)]
        for name in settings:
            if name not in names:
                known = [*names, *_ENGINE, *_ARGUMENTS]
                raise UnknownNameError(f"setting of keyhole with {chosen.name}", name, known)
        chosen = make_policy(policy, settings)
        if device.startswith("cuda") and not torch.cuda.is_available():
            device = "auto"  # the harness passes "cuda:0" if no device is named
        model = pretrained if isinstance(pretrained, Model) else load(pretrained, device, dtype)
        if tokenizer is not None or add_bos_token is not None:
            model = dataclasses.replace(
                model, tokenizer=_tokenizer(tokenizer or pretrained, add_bos_token)
            )
        if model.tokenizer is None:
            raise ModelError(f"{model.name!r} has no tokenizer, which the harness needs")
        longest = model.max_length
        good = max_length is None or (is_count(max_length) and max_length <= longest)
        require(good, "max_length", max_length, f"from 1 to {longest}: {model.length_reason}")
        self._max_length = max_length or longest
        # The engine needs room for a token after the last one, which is never computed here.
        self._engine = LLM(
            dataclasses.replace(model, max_length=longest + 1),
            policy=chosen,
            max_length=self._max_length + 1,
            **own,
        ).engine
        self.tokenizer = model.tokenizer
        self._device = model.device
        self.add_bos_token = add_bos_token
        self.custom_prefix_token_id = prefix_token_id
        self.enable_thinking = enable_thinking
        if enable_thinking and think_end_token is None:
            raise ConfigError("enable_thinking=True needs think_end_token")
        digits = isinstance(think_end_token, str) and think_end_token.isdigit()
        self.think_end_token = int(think_end_token) if digits else think_end_token  # type: ignore[arg-type]
        self.chat_template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self.chat_template_args["enable_thinking"] = enable_thinking

    @property
    def eot_token_id(self) -> int | None:
        """The token at the end of a text."""
        token: int | None = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int | None:
        """The token before a text without context."""
        if self.custom_prefix_token_id is not None:
            return self.custom_prefix_token_id
        begin: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of context and answer together."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """Default number of new tokens, as in the model "hf"."""
        return 256

    @property
    def tokenizer_name(self) -> str:
        """Distinguishes stored requests of different tokenizers."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness stores with its results: the policy, with every "auto" resolved."""
        policy = self._engine.policy
        return {
            "model_dtype": str(self._engine.model.dtype),
            "keyhole_policy": policy.name,
            "keyhole_settings": dataclasses.asdict(policy),
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text; no second BOS before a text that begins with one."""
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token
            prefix = self.prefix_token_id
            if prefix is not None and has_bos_prefix(string, self.tokenizer.decode(prefix)):
                add_special_tokens = False
        return self._encode(string, add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; without its system message if the template takes none."""
        try:
            return self._chat_text(chat_history, add_generation_prompt)
        except jinja2.exceptions.TemplateError:
            rest = [message for message in chat_history if message["role"] != "system"]
            return self._chat_text(rest, add_generation_prompt)

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Per (context, continuation): its log-probability, and whether greedy decoding gives it.

        RequestError for a continuation without tokens, or with more than `max_length`.
        """
        if self.enable_thinking:
            raise ConfigError("enable_thinking=True is for tasks that generate, not loglikelihood")
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each text, in windows of `max_length`, every token once."""
        windows, owners = [], []
        for i, request in enumerate(requests):
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            found = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += found
            owners += [i] * len(found)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for owner, (score, _) in zip(owners, scores, strict=True):
            totals[owner] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to its first stop string.

        RequestError for generation settings that the engine does not have.
        """
        work = [self._generation(*request.args) for request in requests]
        answers = [""] * len(work)

        def finish(i: int, sequence: Request) -> None:
            answers[i] = self._text(sequence.generated, work[i][2])
            self.cache_hook.add_partial("generate_until", requests[i].args, answers[i])

        prompts = [(prompt, params, (), False) for prompt, params, _ in work]
        self._run(prompts, "generate_until", lambda i, sequence: None, finish, disable_tqdm)
        return answers

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        prompts, scores = [], []
        for text, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise RequestError(
                    f"a continuation of {len(continuation)} tokens must have 1 to "
                    f"{self.max_length} to be scored" + (f": {text[1][:50]!r}" if text else "")
                )
            whole = [*context, *continuation][-(self.max_length + 1) :]
            count = len(continuation)
            prompts.append((whole[:-count], params, tuple(whole[-count:-1]), True))
            scores.append(_Score(continuation))

        def finish(i: int, sequence: Request) -> None:
            if requests[i][0] is not None:  # windows of a rolling text have no key
                self.cache_hook.add_partial("loglikelihood", requests[i][0], scores[i].answer)

        def read(i: int, sequence: Request) -> None:
            scores[i].read(sequence.logits)

        self._run(prompts, "loglikelihood", read, finish, disable_tqdm)
        return [score.answer for score in scores]

    def _run(
        self,
        prompts: Sequence[tuple[list[int], SamplingParams, tuple[int, ...], bool]],
        title: str,
        read: Callable[[int, Request], None],
        finish: Callable[[int, Request], None],
        disable_tqdm: bool,
    ) -> None:
        """Runs requests (prompt, params, given tokens, whether their logits are kept) to their end.

        read: called with its number for every request that a step may have changed; finish: called
        once at its end.
        """
        engine, left = self._engine, dict[Request, int]()
        try:
            for i, (prompt, params, given, keep) in enumerate(prompts):
                left[engine.add(prompt, params, given=given, keep_logits=keep)] = i
            bar = tqdm(total=len(left), desc=f"Running {title} requests", disable=disable_tqdm)
            with bar:
                while left:
                    stepped = engine.step()
                    for sequence in {*engine.scheduler.running, *stepped} & left.keys():
                        if sequence.error is not None:
                            raise sequence.error
                        read(left[sequence], sequence)
                        if sequence.is_finished:
                            finish(left.pop(sequence), sequence)
                            bar.update()
        finally:
            for sequence in left:
                engine.abort(sequence)

    def _generation(
        self, context: str, given: dict[str, Any]
    ) -> tuple[list[int], SamplingParams, list[str]]:
        """Prompt, parameters and stop strings of a generation request."""
        kwargs = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        eos = self.eot_token_id
        ending = None if eos is None else self.tokenizer.decode(eos, skip_special_tokens=False)
        until = handle_stop_sequences(kwargs.pop("until"), ending)
        most, sampled = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample", False)
        right = f"from 1 to less than max_length {self.max_length}"
        require(is_count(most) and most < self.max_length, "max_gen_toks", most, right)
        begun = has_bos_prefix(context, self.tokenizer.bos_token)
        prompt = self._encode(context, False if begun else self.add_bos_token)[
            most - self.max_length :
        ]
        longest = kwargs.pop("max_length", None)  # prompt and answer together, as in transformers
        most = most if longest is None else longest - len(prompt)
        if kwargs.pop("num_beams", 1) != 1:
            raise RequestError(
                f"num_beams {given['num_beams']!r} must be 1: beam search is not supported"
            )
        for name in kwargs:
            if name not in _SAMPLING:
                known = ["until", "max_gen_toks", "do_sample", *_SAMPLING]
                raise UnknownNameError("generation setting", name, known)
        if not sampled:  # as in transformers, other sampling settings have no effect
            penalty = kwargs.get("repetition_penalty")
            kwargs = {"temperature": 0.0, "repetition_penalty": penalty}
        elif "seed" not in kwargs:  # seeded by the harness
            kwargs["seed"] = random.getrandbits(32)
        texts, tokens = self._stops(until)
        return (
            prompt,
            SamplingParams(max_tokens=most, stop=texts, stop_token_ids=tokens, **kwargs),
            until,
        )

    def _stops(self, until: list[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Stop strings, and the special tokens among them, which never appear in the text."""
        special = set(self.tokenizer.all_special_ids)
        texts, tokens = [], []
        for text in filter(None, until):
            ids = self._encode(text, False)
            if len(ids) == 1 and ids[0] in special:
                tokens.append(ids[0])
            else:
                texts.append(text)
        return tuple(texts), tuple(tokens)

    def _text(self, tokens: list[int], until: list[str]) -> str:
        """The answer in the generated tokens: after the reasoning, before the first stop string."""
        end = self.think_end_token
        if isinstance(end, int) and end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        if isinstance(end, int):
            text = text.lstrip()
        ending = end if isinstance(end, str) else None
        return str(postprocess_generated_text(text, until, ending))

    def _encode(self, text: str, special: bool | None) -> list[int]:
        kwargs = {} if special is None else {"add_special_tokens": special}
        return [int(token) for token in self.tokenizer.encode(text, **kwargs)]

    def _chat_text(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        text = self.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.chat_template_args,
        )
        return str(text)


#: The arguments of the model besides settings of engine and policy.
_ARGUMENTS = tuple(
    name for name in inspect.signature(KeyholeLM).parameters if name not in ("self", "settings")
)
register_model("keyhole")(KeyholeLM)


@dataclass
class _Score:
    """The log-probability of a continuation, accumulated as the logits of its tokens arrive."""

    tokens: list[int]
    read_tokens: int = 0
    total: float = 0.0
    greedy: bool = True

    def read(self, logits: list[Tensor]) -> None:
        """Reads the new logits and discards them."""
        for place in range(self.read_tokens, len(logits)):
            token, row = self.tokens[place], logits[place]
            self.total += float(row.log_softmax(-1)[token])
            self.greedy &= int(row.argmax()) == token
            logits[place] = _READ
        self.read_tokens = len(logits)

    @property
    def answer(self) -> tuple[float, bool]:
        return self.total, self.greedy


def _batch(batch_size: int | str, max_batch_size: int | None) -> int:
    """The number of simultaneous requests, from the harness's arguments."""
    if str(batch_size) == "1" or str(batch_size).startswith("auto"):
        return max_batch_size or EngineConfig.max_batch
    if not str(batch_size).isdigit():
        raise ConfigError(f"batch_size {batch_size!r} must be a whole number or auto")
    return int(batch_size)


def _tokenizer(name: str | Model, add_bos_token: bool | None) -> Any:
    if isinstance(name, Model):
        raise ConfigError("add_bos_token with a loaded model needs tokenizer=, a folder or hub id")
    kwargs = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    try:
        return AutoTokenizer.from_pretrained(name, **kwargs)
    except Exception as error:  # transformers, tokenizers and the hub each have their own
        raise ModelError(f"the tokenizer {name!r} cannot be loaded: {first_line(error)}") from error


def main() -> int:
    """The harness's command line; errors for users are one line."""
    try:
        cli_evaluate()
    except KeyholeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
