"""The kinds of question one can ask about a world, each with its written-out answer.

An answer repeats what it looks up as four-word sentences, so that a question over several facts is
a chain of single look-ups. Two kinds are different: `count` and `majority` need *all* of an
entity's scattered facts in one step.
"""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from random import Random

from keyhole.eval.tiny_language.world import ATTRIBUTES, World

Asked = tuple[list[str], list[str]]
"""The words of the question and those of the answer, without the frame around them."""


def _sentences(*facts: tuple[str, str, str]) -> list[str]:
    return [word for fact in facts for word in (*fact, ".")]


def _asked(facts: list[tuple[str, str, str]]) -> Asked:
    question = [word for entity, verb, _ in facts for word in (entity, verb, "?")]
    return question, _sentences(*facts)


def recall(world: World, rng: Random) -> Asked:
    """Ask for one fact: `Gilyn keeps ?`."""
    (entity, verb), value = rng.choice(list(world.facts.items()))
    return _asked([(entity, verb, value)])


def multiquery(world: World, rng: Random) -> Asked:
    """Ask for four facts at once."""
    known = list(world.facts.items())
    return _asked([(*key, value) for key, value in rng.sample(known, min(4, len(known)))])


def multivalue(world: World, rng: Random) -> Asked:
    """Ask for all attributes of an entity: `all Bogus ?`."""
    entity = rng.choice(world.complete())
    facts = [(entity, verb, world.facts[entity, verb]) for verb in ATTRIBUTES]
    return ["all", entity, "?"], _sentences(*facts)


def _paths(world: World) -> list[list[tuple[str, str]]]:
    """Give all ways of two or three facts, as (entity, attribute), that end in no name."""
    ends: dict[str, list[list[tuple[str, str]]]] = {}
    for entity, verb in world.facts:
        if verb != "serves":
            ends.setdefault(entity, []).append([(entity, verb)])
    serving = {entity: who for (entity, verb), who in world.facts.items() if verb == "serves"}
    short = {e: [[(e, "serves"), *end] for end in ends.get(who, [])] for e, who in serving.items()}
    long = [[(e, "serves"), *path] for e, who in serving.items() for path in short.get(who, [])]
    return [path for paths in short.values() for path in paths] + long


def hops(world: World, rng: Random) -> Asked:
    """Ask along two or three facts: `Elris serves serves owns ?`."""
    path = rng.choice(_paths(world))
    question = [path[0][0], *(verb for _, verb in path), "?"]
    return question, _sentences(*((*key, world.facts[key]) for key in path))


def vartrack(world: World, rng: Random) -> Asked:
    """Follow a chain of equal names to its number: `Dado equals ?`."""
    chain = rng.choice(world.chains)
    facts = [(left, "equals", right) for left, right in pairwise(chain)]
    return [chain[0], "equals", "?"], _sentences(*facts)


def reference(world: World, rng: Random) -> Asked:
    """Ask for a fact that is stated only as the same as an earlier one."""
    (entity, verb), source = rng.choice(list(world.references.items()))
    return _asked([(entity, verb, world.facts[source, verb])])


def _countable(world: World) -> list[str]:
    return [entity for entity, liked in world.likes.items() if len(liked) < 10]


def count(world: World, rng: Random) -> Asked:
    """Ask how many (at most 9) facts there are of what an entity likes: `count Alma ?`."""
    entity = rng.choice(_countable(world))
    fact = (entity, "likes", str(len(world.likes[entity])))
    return ["count", entity, "?"], _sentences(fact)


def favourite(liked: list[str]) -> str | None:
    """Give the object that leads by at least two, or None."""
    (first, most), (_, second), *_ = [*Counter(liked).most_common(), ("", 0)]
    return first if most >= second + 2 else None


def majority(world: World, rng: Random) -> Asked:
    """Ask for what an entity likes most often: `most Alma ?`."""
    entity, liked = rng.choice([(e, o) for e, o in world.likes.items() if favourite(o)])
    return ["most", entity, "?"], _sentences((entity, "likes", favourite(liked) or ""))


QUESTIONS: dict[str, Callable[[World, Random], Asked]] = {
    kind.__name__: kind
    for kind in (recall, multiquery, multivalue, hops, vartrack, reference, count, majority)
}

_POSSIBLE: dict[str, Callable[[World], bool]] = {
    "multivalue": lambda world: bool(world.complete()),
    "hops": lambda world: bool(_paths(world)),
    "vartrack": lambda world: bool(world.chains),
    "reference": lambda world: bool(world.references),
    "count": lambda world: bool(_countable(world)),
    "majority": lambda world: any(favourite(liked) for liked in world.likes.values()),
}


def is_possible(kind: str, world: World) -> bool:
    """Tell whether the world has what a question of this kind asks about."""
    return kind not in _POSSIBLE or _POSSIBLE[kind](world)


def framed(question: list[str]) -> list[str]:
    """Put `question : ... answer :` around a question."""
    return ["question", ":", *question, "answer", ":"]
