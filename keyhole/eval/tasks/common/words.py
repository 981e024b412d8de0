"""Words, numbers and identifiers of the plain-English tasks, drawn at random.

The lists are our own. Where a long text needs more words than they hold, two nouns are joined
(`riverbell`); names of people and places are made of syllables.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from itertools import product
from random import Random
from typing import Generic, TypeVar

Drawn = TypeVar("Drawn")

ADJECTIVES = tuple(
    """able amber ancient bitter bold brave brief bright brisk broad broken busy calm careful cheap
    clean clear clever cold common crisp curious damp dark dear deep distant double dry dull eager
    early easy empty equal faint fair famous fast fierce final firm flat fond formal fragile free
    fresh gentle giant glad golden grand grave great hard heavy hidden high hollow honest huge
    humble idle inner jolly keen kind large late lazy level light little local lonely long loose
    loud low lucky mellow mild modern modest muddy narrow neat noble novel odd open outer pale
    patient plain polite proud pure quick quiet rapid rare raw ready rich rigid ripe rough round
    royal rural sad safe secret serious shallow sharp short shy silent silver simple slender slow
    small smooth sober soft solid sour spare steady steep stiff strange strict strong subtle sudden
    sunny sweet swift tall tame tender thick thin tidy tight tiny tough true urgent vague vast vivid
    warm weak weary weird wide wild wise wooden young zealous""".split()
)
NOUNS = tuple(
    """acorn anchor apple apron arrow badge bakery barrel basket beacon bell bench berry blanket
    boat bonnet bottle bowl branch brick bridge bridle brook broom brush bucket bugle button cabin
    cable cactus camera candle canoe canvas carpet castle cellar chair chapel cherry chimney circle
    clock cloud coach comet compass corner cradle crane crown cupboard curtain dagger desert desk
    diamond dinner doctor donkey dragon drawer drum eagle engine fabric falcon farmer feather fence
    ferry fiddle finger flame flower forest fountain frame furnace garden gate giraffe glacier glove
    goblet grape guitar hammer harbor harvest hawk helmet horizon hotel insect island jacket jewel
    journal jungle kennel kettle kitchen ladder lantern ledger lemon letter library lizard lobster
    locket magnet marble market meadow melon merchant mirror monkey mountain museum needle nephew
    notebook ocean office onion orchard orphan oven owl paddle painter palace paper parcel parrot
    pasture pebble pencil pepper piano pigeon pillow pitcher planet plaza pocket poem pond potato
    prairie puzzle quarry rabbit radio railway ribbon river robin rocket saddle sailor salmon saucer
    school shadow shelter shovel singer spider spoon squirrel stable statue stove summit table
    tailor tavern teacher temple ticket tiger tower tractor trumpet tunnel turnip turtle umbrella
    valley vessel village vineyard violin wagon walnut warehouse weaver whale wheel willow window
    winter wizard yard zebra""".split()
)
VERBS = tuple(
    """admired avoided borrowed bought carried carved cleaned copied counted covered described drew
    followed forgot found guarded helped ignored inspected liked lost measured mended missed moved
    needed noticed offered owned painted passed praised raised received reached remembered repaired
    shared sketched sold studied trusted visited washed watched welcomed wrapped""".split()
)

_SYLLABLES = tuple(map("".join, product("bdfgjklmnprstvz", "aeiou")))
_ENDINGS = "lmnrst"


class Stream(Generic[Drawn]):
    """Things drawn one after the other and remembered, so that a longer text extends a shorter."""

    def __init__(self, draw: Callable[[], Drawn]) -> None:
        self._draw = draw
        self._drawn: list[Drawn] = []

    def first(self, number: int) -> list[Drawn]:
        """The first so many things, as a new list."""
        while len(self._drawn) < number:
            self._drawn.append(self._draw())
        return self._drawn[:number]


def unique(draw: Callable[[], str]) -> Callable[[], str]:
    """`draw`, without what it has given before."""
    seen: set[str] = set()

    def again() -> str:
        while (found := draw()) in seen:
            pass
        seen.add(found)
        return found

    return again


def key(rng: Random) -> str:
    """An adjective and a noun, as `quiet-river`: 35,000 of them."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def number(rng: Random) -> str:
    """A number of seven digits."""
    return str(rng.randrange(10**6, 10**7))


def identifier(rng: Random) -> str:
    """A UUID of version 4."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def name(rng: Random) -> str:
    """A name of seven letters that means nothing: being equally long, none is part of another."""
    first, second, third = rng.choices(_SYLLABLES, k=3)
    return f"{first}{second}{third}{rng.choice(_ENDINGS)}".capitalize()


def vocabulary(rng: Random) -> Iterator[str]:
    """Every listed word in random order, then pairs of nouns, without repetition."""
    listed = [*ADJECTIVES, *NOUNS, *VERBS]
    rng.shuffle(listed)
    yield from listed
    pairs = [first + second for first, second in product(NOUNS, NOUNS) if first != second]
    rng.shuffle(pairs)
    yield from pairs
