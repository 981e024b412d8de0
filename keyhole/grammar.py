"""Grammars that generated text follows, by llguidance: which tokens may come next.

A grammar is a JSON schema (it begins with "{") or a Lark grammar in llguidance's dialect, in
which `%json {...}` stands for a schema. Needs llguidance, part of the extra `keyhole[serve]`.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keyhole.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

#: Between the parts of a JSON text. Bounded: small models fill endless lines with spaces.
JSON_WHITESPACE = r"[ \n]{0,16}"

#: Compiled grammars that are kept, the most recently used ones.
_MOST_KEPT = 64
#: llguidance's mark of a special token in its vocabulary.
_SPECIAL = b"\xff"


class Grammars:
    """The grammars of one model; compiled ones are kept. Safe from threads.

    eos_token_ids: what may follow a complete text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos = sorted(eos_token_ids)
        self._guard = threading.Lock()  # protects the fields below
        self._kept: OrderedDict[str, GrammarState] = OrderedDict()

    def start(self, grammar: str) -> GrammarState:
        """The grammar at its beginning, for one sequence.

        RequestError for an invalid grammar, and for one whose text the model has no token to begin.
        """
        with self._guard:
            found = self._kept.pop(grammar, None)
        if found is None:  # without the lock: a large schema takes a second
            found = self._compile(grammar)
        with self._guard:
            self._kept[grammar] = found
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return found.copy()

    def _compile(self, grammar: str) -> GrammarState:
        if importlib.util.find_spec("llguidance") is None:
            raise ConfigError("a grammar needs llguidance: pip install 'keyhole[serve]'")
        if self._tokenizer is None or not self._tokenizer.is_fast:
            raise RequestError(
                "a grammar needs a fast tokenizer; this model has none", field="grammar"
            )
        from llguidance import LLMatcher

        vocabulary, offset = self._vocabulary
        try:
            if grammar.lstrip().startswith("{"):
                options = {"whitespace_pattern": JSON_WHITESPACE}
                made = LLMatcher.grammar_from_json_schema(grammar, defaults=options)  # type: ignore[arg-type]
            else:
                made = LLMatcher.grammar_from_lark(grammar)
        except ValueError as error:
            raise RequestError(
                f"the JSON schema is not a JSON object: {error}", field="grammar"
            ) from error
        matcher = LLMatcher(vocabulary, made, log_level=0)
        if matcher.is_error():
            reason = _reason(matcher.get_error())
            raise RequestError(
                f"the grammar or JSON schema is not valid: {reason}", field="grammar"
            )
        sizes = -(-vocabulary.vocab_size // 32), self._vocab_size
        begin = GrammarState(matcher, offset, sizes, self._executor)
        begin.copy().check()
        return begin

    @functools.cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor()

    @functools.cached_property
    def _vocabulary(self) -> tuple[LLTokenizer, int]:
        """The tokens as bytes, and the offset of each where it begins a text.

        Without a decoder, texts are words between spaces: a token is " word", but the first one is
        "word". Each then has a second id, `offset` higher, for that place.
        """
        from llguidance import LLTokenizer
        from llguidance.hf import from_tokenizer

        if self._tokenizer.backend_tokenizer.decoder is not None:
            eos = self._eos or None
            size = max(self._vocab_size, len(self._tokenizer))  # it may know more than the model
            return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=eos), 0
        words = _Words(self._tokenizer, self._vocab_size, self._eos)
        size = len(words.tokens)
        return LLTokenizer(words, n_vocab=size, eos_token=self._eos or None), words.offset  # type: ignore[arg-type]


def _reason(text: str) -> str:
    """The first line of llguidance's error, and the explanation that follows a drawing."""
    lines = text.strip().splitlines()
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join([lines[0], *told[:1]])


class GrammarState:
    """The position of one sequence's text in its grammar.

    offset: of the next token's id, 0 after the first token. sizes: int32 numbers of a mask, and how
    many tokens the model has.
    """

    def __init__(
        self, matcher: LLMatcher, offset: int, sizes: tuple[int, int], executor: LLExecutor
    ) -> None:
        self.matcher, self.executor = matcher, executor
        self.offset, self.sizes = offset, sizes

    def copy(self) -> GrammarState:
        """An independent copy."""
        return GrammarState(self.matcher.deep_copy(), self.offset, self.sizes, self.executor)

    def accept(self, token: int) -> bool:
        """Advances by the next token if the grammar allows it; returns whether it did."""
        taken = self.matcher.try_consume_tokens([token + self.offset]) == 1
        if taken:
            self.offset = 0
        return taken

    @property
    def allows_any(self) -> bool:
        """Whether any token may come next."""
        return bool(allowed([self]).any())

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def check(self) -> None:
        """RequestError if no token may come next."""
        if not self.allows_any:
            raise RequestError(
                "this model cannot write such a text: its tokenizer has no token with which the "
                "grammar or JSON schema could begin",
                field="grammar",
            )


def allowed(states: Sequence[GrammarState]) -> np.ndarray:
    """Masks of the tokens that may come next, int32 [S, ceil(vocabulary / 32)].

    Bit i of number j is token 32 j + i.
    A state that allows no token has no bit set.
    """
    words, tokens = states[0].sizes
    masks = np.zeros((len(states), words), dtype=np.int32)
    rows = [(state.matcher, row) for row, state in enumerate(states)]
    states[0].executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, 4 * words, len(states))
    for row, state in enumerate(states):
        if state.matcher.is_error():
            masks[row] = 0
        elif state.offset:
            masks[row] = np.roll(masks[row], -(state.offset // 32))
    masks = masks[:, : -(-tokens // 32)]
    if tokens % 32:  # the tokenizer may have more
        masks[:, -1] &= (1 << tokens % 32) - 1
    return masks


class _Words:
    """The vocabulary of a tokenizer of words, for llguidance. offset: a multiple of 32.

    Single bytes follow the words: llguidance must be able to spell what a grammar forces with
    tokens; otherwise it considers it written. The model does not have them, so masks omit them.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos: list[int]) -> None:
        self.offset = -(-vocab_size // 32) * 32
        self.bos_token_id = None
        self.eos_token_id = eos[0] if eos else 0
        special = set(tokenizer.all_special_ids)
        bare: list[bytes] = []
        for token in range(self.offset):
            word = tokenizer.convert_ids_to_tokens(token) if token < vocab_size else None
            if word is None or token in special:
                bare.append(_SPECIAL + b"<%d>" % token)
            else:
                bare.append(str(word).encode())
        spaced = [word if word.startswith(_SPECIAL) else b" " + word for word in bare]
        self.tokens = spaced + bare + [bytes([byte]) for byte in range(255)]
        self.special_token_ids = [
            token for token, name in enumerate(self.tokens) if name.startswith(_SPECIAL)
        ]
        self.is_tokenizer_wrapper = True
        self._ids = {word: token for token, word in reversed([*enumerate(self.tokens)])}

    def __call__(self, text: str | bytes) -> list[int]:
        """The longest tokens, one after another."""
        left, found = text.encode() if isinstance(text, str) else text, []
        while left:
            end = next(end for end in range(len(left), 0, -1) if left[:end] in self._ids)
            found.append(self._ids[left[:end]])
            left = left[end:]
        return found
