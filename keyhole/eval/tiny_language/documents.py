"""Questions over several documents in the bundled model's world, made from a seed.

    one               one fact of one document
    two_hop           two facts of two documents, the second found through the first
    needs_each_other  a fact that a document states by referring to an earlier document

Documents of the first two kinds can be encoded separately: stored documents are as good as new
ones, and only the selection matters. In the third kind, a document that is encoded alone lacks what
it refers to, and selecting the right blocks cannot repair that: the referring words must be
recomputed while the words that they refer to are visible. Tables should keep the kinds apart.

They should also keep apart where the needed sentences are: at the `ends` of their documents, which
SamKV always keeps and recomputes; in the `middle`, where they have to be found; or `anywhere`.

A word is a token, and facts are scattered: unlike in real texts, parts of a document have no topics
of their own. With `subjects` they do: what a document says about a name stands together.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from keyhole.config import require_known
from keyhole.errors import ConfigError
from keyhole.eval.tiny_language.world import FILLERS, NAMES, NUMBERS, OBJECTS, PLACES, framed

KINDS = ("one", "two_hop", "needs_each_other")
WHERE = ("anywhere", "ends", "middle")
#: Shortest document: it has a middle besides its ends.
MIN_WORDS = 320

_VALUES = {"keeps": NUMBERS, "owns": OBJECTS, "inhabits": PLACES}
_OPENING, _CLOSING = 32, 64
"""Words at the `ends` of a document: within the first and the last two blocks of 64, which SamKV
always keeps, however short the last one is; and at the beginning within what EPIC recomputes.
"""
_SENTENCES = 0.4
"""Share of the sentences that are facts which no question asks for: three words in ten."""
_Facts = list[tuple[str, str, str]]


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A sentence that the answer needs: `document` from 0, its first `word` in it, its `text`."""

    document: int
    word: int
    text: str


@dataclass(frozen=True, kw_only=True)
class DocumentItem:
    """A question over documents, and its one right answer; texts are words separated by single
    spaces.

    names: of the documents, unique over all items, so that one store can hold many. prefix: the
    text before the first document, in front of which the tokenizer writes `<bos>`. question: from
    `question :` to `answer :`. answer: what the model should write, ending in `done`. needed: the
    sentences without which the answer cannot be known.
    """

    kind: str
    where: str
    names: tuple[str, ...]
    documents: tuple[str, ...]
    question: str
    answer: str
    needed: tuple[Passage, ...]
    prefix: str = ""

    @property
    def prompt(self) -> str:
        """The whole prompt, for a model that computes everything."""
        return " ".join(part for part in (self.prefix, *self.documents, self.question) if part)


def make(
    kind: str,
    *,
    num_documents: int,
    words: int,
    seed: int,
    where: str = "anywhere",
    subjects: bool = False,
) -> DocumentItem:
    """Item number `seed` of a kind: `num_documents` documents of `words` words each.

    where: position of the needed sentences in their documents. subjects: the facts about a name
    follow each other, four to a paragraph, and a needed sentence stands among three others about
    its name. The same arguments give the same item. Raises UnknownNameError for an unknown kind or
    position, and ConfigError for fewer than 2 documents or fewer than 320 words.
    """
    for what, value, known in (("kind of question", kind, KINDS), ("place", where, WHERE)):
        require_known(what, value, known)
    if num_documents < 2:
        raise ConfigError(f"num_documents is {num_documents}; these questions need at least 2")
    if words < MIN_WORDS:
        raise ConfigError(f"words is {words}; a document needs at least {MIN_WORDS}")
    name = f"{kind}-{where}-{num_documents}x{words}-{seed}{'-subjects' if subjects else ''}"
    rng = Random(f"documents/{name}")
    names = rng.sample(NAMES, len(NAMES))
    asked, answer, sentences = _ask(kind, rng, names.pop(), names.pop())
    chosen = rng.sample(range(num_documents), len(sentences))
    if kind == "needs_each_other":  # what is pointed to has been read before
        chosen.sort()
    needed, written = [], []
    for document, sentence in zip(chosen, sentences, strict=True):
        before, after = _around(rng, sentence, names) if subjects else ([], [])
        paragraph = [*before, *sentence, *after]
        word = _place(where, rng, len(paragraph), words)
        written.append(Passage(document=document, word=word, text=" ".join(paragraph)))
        text = " ".join(sentence)
        needed.append(Passage(document=document, word=word + len(before), text=text))
    facts = _facts(rng, names)
    if subjects:
        order = {known: place for place, known in enumerate(names)}
        facts.sort(key=lambda fact: order[fact[0]])
    texts = []
    for number in range(num_documents):
        own = [passage for passage in written if passage.document == number]
        texts.append(" ".join(_write(rng, number + 1, words, own, facts, subjects)))
    return DocumentItem(
        kind=kind,
        where=where,
        names=tuple(f"{name}/{number + 1}" for number in range(num_documents)),
        documents=tuple(texts),
        question=" ".join(framed(asked)),
        answer=" ".join([*(word for fact in answer for word in (*fact, ".")), "done"]),
        needed=tuple(needed),
    )


def exact_match(item: DocumentItem, generated: str) -> bool:
    """Whether the answer is right to the last word; what follows `done` does not count."""
    answer = item.answer.split()
    return generated.split()[: len(answer)] == answer


def _ask(
    kind: str, rng: Random, first: str, second: str
) -> tuple[list[str], _Facts, list[tuple[str, ...]]]:
    """Words of the question, facts of the answer, and the needed sentences."""
    verb = rng.choice(list(_VALUES))
    value = rng.choice(_VALUES[verb])
    if kind == "one":
        return [first, verb, "?"], [(first, verb, value)], [(first, verb, value, ".")]
    if kind == "two_hop":
        hops = [(first, "serves", second), (second, verb, value)]
        return [first, "serves", verb, "?"], hops, [(*hop, ".") for hop in hops]
    stated, pointing = (second, verb, value, "."), ("both", first, second, verb, ".")
    return [first, verb, "?"], [(first, verb, value)], [stated, pointing]


def _around(
    rng: Random, sentence: tuple[str, ...], names: list[str]
) -> tuple[list[str], list[str]]:
    """Words of the other facts about a sentence's name, before and after it: three sentences."""
    name, verb = (sentence[1], sentence[3]) if sentence[0] == "both" else sentence[:2]
    others = [(name, own, rng.choice(values)) for own, values in _VALUES.items() if own != verb]
    if verb != "serves":
        others.append((name, "serves", rng.choice(names)))
    rng.shuffle(others)
    cut = rng.randrange(len(others) + 1)
    texts = [
        [word for fact in part for word in (*fact, ".")] for part in (others[:cut], others[cut:])
    ]
    return texts[0], texts[1]


def _place(where: str, rng: Random, size: int, words: int) -> int:
    """The first word of a sentence of `size` words, chosen so that whole sentences fit before and
    after it.
    """
    last = words - size
    places: list[int] = [*range(3, last + 1)]
    if where == "middle":
        places = [*range(words // 4, words // 2)]
    elif where == "ends":
        places = [*range(3, _OPENING - size + 1), *range(words - _CLOSING, last + 1)]
    return rng.choice([place for place in places if place not in (4, last - 1)])


def _facts(rng: Random, names: list[str]) -> _Facts:
    """Every possible fact about these names, one value each, in random order."""
    facts = [(name, verb, rng.choice(values)) for name in names for verb, values in _VALUES.items()]
    facts += [(name, "serves", rng.choice(names)) for name in names]
    rng.shuffle(facts)
    return facts


def _write(
    rng: Random, number: int, words: int, passages: list[Passage], facts: _Facts, subjects: bool
) -> list[str]:
    """A document of exactly `words` words, with these passages at their positions.

    Other facts are taken from the end of `facts`.
    """
    text = ["document", str(number), ":"]
    for passage in passages:
        _fill(rng, text, passage.word, facts, subjects)
        text += passage.text.split()
    _fill(rng, text, words, facts, subjects)
    return text


def _fill(rng: Random, text: list[str], until: int, facts: _Facts, subjects: bool) -> None:
    """Adds facts and filler up to the word `until`; the shortest sentence is a word and a
    period. subjects: no filler before the next fact about the same name.
    """
    while room := until - len(text):
        sizes = [size for size in range(2, 9) if size == room or size < room - 1]
        goes_on = subjects and len(text) > 4 and bool(facts) and text[-4] == facts[-1][0]
        if facts and 4 in sizes and (goes_on or rng.random() < _SENTENCES):
            text += [*facts.pop(), "."]
        else:
            size = rng.choice([size for size in sizes if size >= 4] or sizes)
            text += [*rng.choices(FILLERS, k=size - 1), "."]
