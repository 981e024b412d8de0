"""A text made of small facts: the context over which the questions are asked.

Every fact is the four-word sentence `ENTITY verb VALUE .`, so that every look-up is the same:
standing on the verb with the entity before it, find the earlier value that followed this verb and
this entity. Between the facts stands filler; with documents, the text is cut into numbered ones.

A reference, `both Boris Alma keeps .`, gives Boris whatever an *earlier* document says that Alma
keeps. Read without that document, it says nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from keyhole.eval.tiny_language.vocabulary import FILLERS, NAMES, NUMBERS, OBJECTS, PLACES

ATTRIBUTES = ("keeps", "owns", "inhabits", "serves")
_VALUES = {"keeps": NUMBERS, "owns": OBJECTS, "inhabits": PLACES}
MAX_FACTS = 700
"""320 names with up to four attributes each: beyond this, names would run out."""


@dataclass(kw_only=True)
class World:
    """What a text says, and the text itself as words, document by document."""

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
    """Write a text of at most `length` words, of which `density` belong to facts.

    `features` may name `chains`, `likes` and `references`; plain facts are always there. Without
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
        """Where the text after the section of `place` begins; in the only section, `place`."""
        return (self.section(place) + 1) / self.sections if self.sections > 1 else place

    def fill(self, length: int) -> None:
        """Add filler sentences until the text is `length` words long, or just short of it."""
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
    """Give `total` objects: a favourite with a small lead, the rest shared by three others."""
    favourite, *others = rng.sample(OBJECTS, 4)
    each = max(0, (total - rng.randint(2, 4)) // 4)
    return [favourite] * (total - 3 * each) + others * each


def _add_facts(world: World, placed: _Placed, names: list[str], num_facts: int) -> None:
    """Give entities some or all attributes; `serves` names another entity that has facts."""
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
