"""The bundled model's world: its words, texts made of small facts, and questions about them.

One word is one token, so text and token positions can be compared by eye. The tokenizer writes
`<bos>` in front of every encoded text, as Llama's does: `tokenizer(prompt).input_ids` is what the
model expects. Pieces that are joined later (documents, a second turn) are encoded with
`add_special_tokens=False`, and so is the output of the chat template, which contains its own
`<bos>`.

Every fact is the four-word sentence `ENTITY verb VALUE .`, so that every look-up is the same: at
the verb, with the entity before it, find the earlier value that followed this verb and this entity.
There is filler between the facts; with documents, the text is divided into numbered ones. A
reference, `both Boris Alma keeps .`, assigns to Boris whatever an *earlier* document says that Alma
keeps. Without that document, it has no meaning.

An answer repeats what it looks up as four-word sentences, so that a question over several facts is
a chain of single look-ups. Two kinds are different: `count` and `majority` need *all* of an
entity's scattered facts in one step.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from random import Random

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"


_LISTS: dict[str, list[str]] = {
    kind: words.split()
    for kind, words in tomllib.loads(
        Path(__file__).with_name("words.toml").read_text(encoding="utf-8")
    ).items()
}
FILLERS = tuple(_LISTS["fillers"])
NAMES = tuple(first + last for first, last in product(_LISTS["first"], _LISTS["last"]))
PLACES = tuple(_LISTS["places"])
OBJECTS = tuple(_LISTS["objects"])
NUMBERS = tuple(str(number) for number in range(100))
STEPS = tuple(f"s{step}" for step in range(320))
HOPS = {2: "twice", 3: "thrice"}
"""What marks that so many facts are followed in one step."""

_WORDS = (
    *(PAD, BOS, EOS),
    *_LISTS["markers"],
    *_LISTS["verbs"],
    *(*FILLERS, *NAMES, *PLACES, *OBJECTS, *NUMBERS, *STEPS),
    *_LISTS["hops"],
)
VOCABULARY_SIZE = 928
"""The words, padded to a multiple of 32 so that the output matrix has a friendly shape."""

WORD_IDS = {
    word: index
    for index, word in enumerate(
        (*_WORDS, *(f"<unused{n}>" for n in range(VOCABULARY_SIZE - len(_WORDS))))
    )
}

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- ' ' + message.content | trim -}}
{%- if message.role == 'assistant' -%}
{{- ' ' + eos_token -}}
{%- elif message.role == 'user' and not (message.content | trim).endswith('answer :') \
and (add_generation_prompt or not loop.last) -%}
{{- ' answer :' -}}
{%- endif -%}
{%- endfor -%}"""
"""Messages joined by spaces, with `answer :` after a user's question unless it is already there."""


ATTRIBUTES = ("keeps", "owns", "inhabits", "serves")
_VALUES = {"keeps": NUMBERS, "owns": OBJECTS, "inhabits": PLACES}
MAX_FACTS = 700
"""320 names with up to four attributes each; above this, names would run out."""


@dataclass(kw_only=True)
class World:
    """The facts of a text, and the text itself as words, document by document."""

    facts: dict[tuple[str, str], str] = field(default_factory=dict)
    """(entity, attribute) -> value, as stated."""
    references: dict[tuple[str, str], str] = field(default_factory=dict)
    """(entity, attribute) -> the entity referred to, whose attribute is in `facts`."""
    chains: list[list[str]] = field(default_factory=list)
    """Names that equal each other, ending in a number."""
    likes: dict[str, list[str]] = field(default_factory=dict)
    """Entity -> objects, with repetitions, one sentence each."""
    documents: list[list[str]] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The whole text."""
        return [word for document in self.documents for word in document]

    def complete(self) -> list[str]:
        """The entities that have every attribute."""
        count = Counter(entity for entity, _ in self.facts)
        return [entity for entity, total in count.items() if total == len(ATTRIBUTES)]


def write_world(
    rng: Random,
    length: int,
    *,
    density: float = 0.3,
    num_documents: int = 0,
    features: Sequence[str] = (),
) -> World:
    """Writes a text of at most `length` words, of which a share of `density` are in facts.

    `features` may name `chains`, `likes` and `references`; plain facts are always included. Without
    documents (0), the text is one piece without a heading.
    """
    world = World()
    sections = max(num_documents, 1)
    headings = 3 * num_documents
    num_facts = max(2, min(MAX_FACTS, int((length - headings) * density / 4)))
    names = rng.sample(NAMES, len(NAMES))
    placed = _Placed(rng, sections)
    if "chains" in features:
        _add_chains(world, placed, names, max(2, num_facts // 6))
    if "likes" in features:
        _add_likes(world, placed, names, max(3, num_facts // 4))
    num_references = max(1, num_facts // 6) if "references" in features else 0
    _add_facts(world, placed, names, max(2, num_facts - placed.count - num_references))
    _add_references(world, placed, names, num_references)
    placed.fill(length - headings)
    world.documents = placed.documents(with_headings=num_documents > 0)
    return world


class _Placed:
    """Sentences at random places between 0 and 1; sorting by place gives the text."""

    def __init__(self, rng: Random, sections: int) -> None:
        self.rng = rng
        self.sections = sections
        self.sentences: list[tuple[float, list[str]]] = []

    @property
    def count(self) -> int:
        return len(self.sentences)

    def add(self, *words: str, after: float = 0.0) -> float:
        place = self.rng.uniform(after, 1.0)
        self.sentences.append((place, [*words, "."]))
        return place

    def section(self, place: float) -> int:
        return min(int(place * self.sections), self.sections - 1)

    def next_section(self, place: float) -> float:
        """Start of the section after `place`; with a single section, `place` itself."""
        return (self.section(place) + 1) / self.sections if self.sections > 1 else place

    def fill(self, length: int) -> None:
        """Adds filler sentences until the text is `length` words long, or slightly shorter."""
        room = length - sum(len(words) for _, words in self.sentences)
        while room >= 4:
            size = min(self.rng.randint(3, 7), room - 1)
            self.add(*self.rng.choices(FILLERS, k=size))
            room -= size + 1

    def documents(self, *, with_headings: bool) -> list[list[str]]:
        texts: list[list[str]] = [
            ["document", str(number), ":"] if with_headings else []
            for number in range(1, self.sections + 1)
        ]
        for place, words in sorted(self.sentences):
            texts[self.section(place)].extend(words)
        return texts


def _add_chains(world: World, placed: _Placed, names: list[str], num_facts: int) -> None:
    while num_facts > 0 and len(names) > 40:
        length = min(placed.rng.randint(1, 6), num_facts)
        chain = [names.pop() for _ in range(length)] + [placed.rng.choice(NUMBERS)]
        for left, right in pairwise(chain):
            placed.add(left, "equals", right)
        world.chains.append(chain)
        num_facts -= length


def _add_likes(world: World, placed: _Placed, names: list[str], num_facts: int) -> None:
    rng = placed.rng
    while num_facts > 0 and len(names) > 40:
        many = num_facts > 20 and rng.random() < 0.4
        total = min(rng.randint(10, 24) if many else rng.randint(1, 9), num_facts)
        entity = names.pop()
        world.likes[entity] = _liked_objects(rng, total)
        for thing in world.likes[entity]:
            placed.add(entity, "likes", thing)
        num_facts -= total


def _liked_objects(rng: Random, total: int) -> list[str]:
    """`total` objects: a favourite with a small lead, the rest shared by three others."""
    favourite, *others = rng.sample(OBJECTS, 4)
    each = max(0, (total - rng.randint(2, 4)) // 4)
    return [favourite] * (total - 3 * each) + others * each


def _add_facts(world: World, placed: _Placed, names: list[str], num_facts: int) -> None:
    """Gives entities some or all attributes; `serves` names another entity that has facts."""
    rng = placed.rng
    wanted: list[tuple[str, str]] = []
    entities: list[str] = []
    reserve = 8  # names left for references
    while len(wanted) < num_facts and len(names) > reserve:
        entities.append(names.pop())
        size = 4 if rng.random() < 0.4 else rng.randint(1, 3)
        wanted += [(entities[-1], verb) for verb in sorted(rng.sample(ATTRIBUTES, size))]
    for entity, verb in wanted[:num_facts]:
        value = rng.choice(_VALUES.get(verb, entities))
        while value == entity:
            value = rng.choice(NAMES)
        world.facts[entity, verb] = value
        placed.add(entity, verb, value)


def _add_references(world: World, placed: _Placed, names: list[str], count: int) -> None:
    rng = placed.rng
    places = {
        (words[0], words[1]): place
        for place, words in placed.sentences
        if (words[0], words[1]) in world.facts and words[1] != "serves"
    }
    early = [
        (key, place)
        for key, place in sorted(places.items())
        if placed.sections == 1 or placed.section(place) < placed.sections - 1
    ]
    for (source, verb), place in rng.sample(early, min(count, len(early), len(names))):
        entity = names.pop()
        world.references[entity, verb] = source
        placed.add("both", entity, source, verb, after=placed.next_section(place))


Asked = tuple[list[str], list[str]]
"""The words of the question and of the answer, without the frame around them."""


def _sentences(*facts: tuple[str, str, str]) -> list[str]:
    return [word for fact in facts for word in (*fact, ".")]


def _asked(facts: list[tuple[str, str, str]]) -> Asked:
    question = [word for entity, verb, _ in facts for word in (entity, verb, "?")]
    return question, _sentences(*facts)


def recall(world: World, rng: Random) -> Asked:
    """Asks for one fact: `Gilyn keeps ?`."""
    (entity, verb), value = rng.choice(list(world.facts.items()))
    return _asked([(entity, verb, value)])


def multiquery(world: World, rng: Random) -> Asked:
    """Asks for four facts at once."""
    known = list(world.facts.items())
    return _asked([(*key, value) for key, value in rng.sample(known, min(4, len(known)))])


def multivalue(world: World, rng: Random) -> Asked:
    """Asks for all attributes of an entity: `all Bogus ?`."""
    entity = rng.choice(world.complete())
    facts = [(entity, verb, world.facts[entity, verb]) for verb in ATTRIBUTES]
    return ["all", entity, "?"], _sentences(*facts)


def _paths(world: World) -> list[list[tuple[str, str]]]:
    """All paths of two or three facts, as (entity, attribute), that do not end in a name."""
    ends: dict[str, list[list[tuple[str, str]]]] = {}
    for entity, verb in world.facts:
        if verb != "serves":
            ends.setdefault(entity, []).append([(entity, verb)])
    serving = {entity: who for (entity, verb), who in world.facts.items() if verb == "serves"}
    short = {e: [[(e, "serves"), *end] for end in ends.get(who, [])] for e, who in serving.items()}
    long = [[(e, "serves"), *path] for e, who in serving.items() for path in short.get(who, [])]
    return [path for paths in short.values() for path in paths] + long


def hops(world: World, rng: Random) -> Asked:
    """Asks along two or three facts: `Elris serves serves owns ?`."""
    path = rng.choice(_paths(world))
    question = [path[0][0], *(verb for _, verb in path), "?"]
    return question, _sentences(*((*key, world.facts[key]) for key in path))


def direct(world: World, rng: Random) -> Asked:
    """Asks along two or three facts for the last value alone: `twice Elris serves owns ?`."""
    path = rng.choice(_paths(world))
    words = [path[0][0], *(verb for _, verb in path)]
    return [HOPS[len(path)], *words, "?"], [*words, world.facts[path[-1]], "."]


def vartrack(world: World, rng: Random) -> Asked:
    """Follows a chain of equal names to its number: `Dado equals ?`."""
    chain = rng.choice(world.chains)
    facts = [(left, "equals", right) for left, right in pairwise(chain)]
    return [chain[0], "equals", "?"], _sentences(*facts)


def reference(world: World, rng: Random) -> Asked:
    """Asks for a fact that is stated only by reference to an earlier one."""
    (entity, verb), source = rng.choice(list(world.references.items()))
    return _asked([(entity, verb, world.facts[source, verb])])


def _countable(world: World) -> list[str]:
    return [entity for entity, liked in world.likes.items() if len(liked) < 10]


def count(world: World, rng: Random) -> Asked:
    """Asks how many things (at most 9) an entity likes: `count Alma ?`."""
    entity = rng.choice(_countable(world))
    fact = (entity, "likes", str(len(world.likes[entity])))
    return ["count", entity, "?"], _sentences(fact)


def favourite(liked: list[str]) -> str | None:
    """The object that leads by at least two, or None."""
    (first, most), (_, second), *_ = [*Counter(liked).most_common(), ("", 0)]
    return first if most >= second + 2 else None


def majority(world: World, rng: Random) -> Asked:
    """Asks for what an entity likes most often: `most Alma ?`."""
    entity, liked = rng.choice([(e, o) for e, o in world.likes.items() if favourite(o)])
    return ["most", entity, "?"], _sentences((entity, "likes", favourite(liked) or ""))


QUESTIONS: dict[str, Callable[[World, Random], Asked]] = {
    kind.__name__: kind
    for kind in (
        recall,
        multiquery,
        multivalue,
        hops,
        vartrack,
        reference,
        count,
        majority,
        direct,
    )
}

_POSSIBLE: dict[str, Callable[[World], bool]] = {
    "multivalue": lambda world: bool(world.complete()),
    "hops": lambda world: bool(_paths(world)),
    "direct": lambda world: bool(_paths(world)),
    "vartrack": lambda world: bool(world.chains),
    "reference": lambda world: bool(world.references),
    "count": lambda world: bool(_countable(world)),
    "majority": lambda world: any(favourite(liked) for liked in world.likes.values()),
}


def is_possible(kind: str, world: World) -> bool:
    """Whether the world has what a question of this kind asks about."""
    return kind not in _POSSIBLE or _POSSIBLE[kind](world)


def framed(question: list[str]) -> list[str]:
    """The question in the frame `question : ... answer :`."""
    return ["question", ":", *question, "answer", ":"]
