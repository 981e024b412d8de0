"""Retrieval: RULER's needles in a haystack, the passkey, and a key's value in a JSON object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from keyhole.config import require
from keyhole.eval.tasks.base import (
    CountTokens,
    Sample,
    TaskAtDepth,
    Written,
    first_number,
    fitted,
    room_for,
)
from keyhole.eval.tasks.materials import (
    NOISE,
    Stream,
    identifier,
    key,
    number,
    sentence,
    unique,
    with_needles,
)

_NEEDLE_TOKENS = 128
_GRID = 40
"""In prose, RULER draws each needle's position from this many, evenly spread."""
_DRAW = {"words": key, "numbers": number, "uuids": identifier}


@dataclass(frozen=True, kw_only=True)
class Niah(TaskAtDepth):
    """Find the values of one or more keys.

    RULER's needles in a haystack: eight tasks that differ in haystack, keys, values and questions.

    A needle says which magic value belongs to a key. The haystack is `noise` (one line repeated),
    `prose` (RULER: `essay`) or `needles` (nothing but other needles). Hsieh et al., "RULER: What's
    the Real Context Size of Your Long-Context Language Models?", COLM 2024, section 3.1 and
    appendix B; settings as in its `synthetic.yaml`, 128 new tokens, scored by string_match_all.

    Differences: templates and noise are reworded and the essays are made up, so scores compare with
    each other and not with published ones. Keys and values never repeat within a sample. Each
    sample is filled separately; RULER fills the first one and uses its size for all.
    """

    haystack: str = "prose"
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    """Number of keys in needles, not counting the needles of the haystack."""
    num_values: int = 1
    """Values per key, each in a needle of its own."""
    num_queries: int = 1
    """Number of keys in the question."""

    def __post_init__(self) -> None:
        super().__post_init__()
        single = self.num_values == self.num_queries == 1
        require(
            single or self.depth is None, "depth", self.depth, "None: several needles are asked"
        )

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; the needles that are asked for are `Sample.depths`."""
        rng = self.random(length, seed)
        draw_key = unique(partial(_DRAW[self.keys], rng))
        draw_value = unique(partial(_DRAW[self.values], rng))
        num_keys = max(self.num_keys, self.num_queries)
        pairs = [
            (draw_key(), [draw_value() for _ in range(self.num_values)]) for _ in range(num_keys)
        ]
        asked = rng.sample(pairs, self.num_queries)
        needles = [self._needle(key, value) for key, values in pairs for value in values]
        needed = [self._needle(key, value) for key, values in asked for value in values]
        places = dict(zip(needles, self._places(rng, len(needles)), strict=True))
        if self.depth is not None:
            places[needed[0]] = self.depth
        answers = tuple(value for _, values in asked for value in values)
        question, prefix = self._question([key for key, _ in asked], len(answers))
        new_tokens = room_for(", ".join(answers), count, _NEEDLE_TOKENS)
        hay = Stream(self._hay(self.random(length, seed, "haystack"), draw_key, draw_value))

        def write(size: int) -> Written:
            placed = [(place, needle) for needle, place in places.items()]
            text = with_needles(hay.first(size), placed)
            return Written(
                context=self._instruction(len(answers))
                + (" " if self.haystack == "prose" else "\n").join(text),
                question=question,
                answer_prefix=prefix,
                answers=answers,
                needed=tuple(needed),
                max_new_tokens=new_tokens,
            )

        return fitted(self.name, length, seed, count, write, least=len(needles))

    def _places(self, rng: Random, many: int) -> list[float]:
        if self.haystack == "prose":
            return [place / (_GRID - 1) for place in rng.sample(range(_GRID), many)]
        return [rng.random() for _ in range(many)]

    def _hay(
        self, rng: Random, draw_key: Callable[[], str], draw_value: Callable[[], str]
    ) -> Callable[[], str]:
        if self.haystack == "noise":
            return lambda: NOISE
        if self.haystack == "prose":
            return partial(sentence, rng)
        return lambda: self._needle(draw_key(), draw_value())

    def _needle(self, key: str, value: str) -> str:
        return f"A magic {self.values.removesuffix('s')} that belongs to {key} is {value}."

    def _instruction(self, many: int) -> str:
        kind = self.values.removesuffix("s")
        what = f"A magic {kind} is" if many == 1 else f"Magic {kind}s are"
        it = "it" if many == 1 else "them"
        return f"{what} hidden in the text below. Remember {it}; a question about {it} follows.\n"

    def _question(self, keys: list[str], many: int) -> tuple[str, str]:
        kind = self.values.removesuffix("s")
        whom = ", ".join(keys[:-1]) + f", and {keys[-1]}" if len(keys) > 1 else keys[0]
        if many == 1:
            what, says = f"What is the magic {kind} that belongs", f"The magic {kind} that belongs"
            return f"\n{what} to {whom} in the text above?", f" {says} to {whom} in the text is"
        what, says = f"What are all the magic {kind}s that belong", f"The magic {kind}s that belong"
        return f"\n{what} to {whom} in the text above?", f" {says} to {whom} in the text are"


NIAH = (
    Niah(name="niah_single_1", haystack="noise"),
    Niah(name="niah_single_2"),
    Niah(name="niah_single_3", values="uuids"),
    Niah(name="niah_multikey_1", num_keys=4),
    Niah(name="niah_multikey_2", haystack="needles"),
    Niah(name="niah_multikey_3", haystack="needles", keys="uuids", values="uuids"),
    Niah(name="niah_multivalue", num_values=4),
    Niah(name="niah_multiquery", num_queries=4),
)


_PASSKEY_TOKENS = 16
_PASSKEY_INSTRUCTION = (
    "One thing in the following text matters, and the rest does not. Find it and keep it in mind; "
    "a question about it follows.\n"
)


@dataclass(frozen=True, kw_only=True)
class Passkey(TaskAtDepth):
    """Give the number.

    The passkey: a number of five digits in one line that is repeated, at a chosen depth.

    Mohtashami and Jaggi, "Landmark Attention", NeurIPS 2023, section 4.2; InfiniteBench's
    `passkey`. Scored by whether the first number in the answer is the key.

    Difference: line, needle and instruction are reworded; 16 new tokens (InfiniteBench: 6), because
    some tokenizers use one token per digit and some models begin with a word.
    """

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; `Sample.depths` is the position of the key."""
        rng = self.random(length, seed)
        passkey = str(rng.randrange(10000, 100000))
        place = self.place(rng)
        needle = f"The passkey is {passkey}. Keep it in mind: {passkey} is the passkey."
        new_tokens = room_for(passkey, count, _PASSKEY_TOKENS)

        def write(size: int) -> Written:
            return Written(
                context=_PASSKEY_INSTRUCTION
                + "\n".join(with_needles([NOISE] * size, [(place, needle)])),
                question="\nWhat is the passkey?",
                answer_prefix=" The passkey is",
                answers=(passkey,),
                needed=(needle,),
                max_new_tokens=new_tokens,
            )

        return fitted(self.name, length, seed, count, write)

    def score(self, sample: Sample, generated: str) -> float:
        """1 if the first number is the key, else 0."""
        return first_number(sample.answers, generated)


PASSKEY = Passkey(name="passkey")


_VALUE_TOKENS = 50
_VALUE_INSTRUCTION = "Look up the value of one key in this JSON object.\n\n"


@dataclass(frozen=True, kw_only=True)
class KeyValue(TaskAtDepth):
    """Give the value of a key.

    Retrieval from pairs of identifiers: the value of one key in a large JSON object.

    Liu et al., "Lost in the Middle", TACL 2024, section 3; InfiniteBench's `kv_retrieval` is the
    same with more pairs. All lines look alike, so only the key itself shows which one to read.
    Scored by whether the answer contains the value; 50 new tokens, as in InfiniteBench.

    Difference: the instruction is reworded.
    """

    def make(self, length: int, seed: int, count: CountTokens) -> Sample:
        """Sample number `seed`; `Sample.depths` is the position of the requested pair."""
        rng = self.random(length, seed)
        draw = unique(partial(identifier, rng))
        key, value = draw(), draw()
        place = self.place(rng)
        asked = f'"{key}": "{value}"'
        pairs = Stream(lambda: f'"{draw()}": "{draw()}"')
        new_tokens = room_for(value, count, _VALUE_TOKENS)

        def write(size: int) -> Written:
            lines = with_needles(pairs.first(size), [(place, asked)])
            return Written(
                context=_VALUE_INSTRUCTION + "{" + ",\n ".join(lines) + "}",
                question=f'\n\nKey: "{key}"',
                answer_prefix="\nIts value:",
                answers=(value,),
                needed=(asked,),
                max_new_tokens=new_tokens,
            )

        return fitted(self.name, length, seed, count, write)


KEY_VALUE = KeyValue(name="key_value")
