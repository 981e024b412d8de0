"""Long generations: a walk through shuffled rules, and a derivation from a shuffled program.

Each written step needs a fact of the prompt; a step of a derivation needs, besides, the result of
a random *earlier generated* step, so forgetting what was written is as fatal as forgetting the
prompt.
"""

from random import Random

from keyhole.eval.tiny_language.vocabulary import NAMES, STEPS

Program = tuple[list[str], list[str], list[str]]
"""Words of the context, of the question with its frame, and of the answer without its end."""


def walk(rng: Random, length: int) -> Program:
    """Write a chain of names in random order and follow its last two thirds to the end.

    Prompt and answer together have at most `length` words.
    """
    rules = max(2, min(300, (length - 11) * 3 // 20))
    chain = rng.sample(NAMES, rules)
    # The rest of the rules only stand in the way: no step can be guessed by elimination.
    start = rules // 3
    facts = [
        [name, "follows", following, "."]
        for name, following in zip(chain, [*chain[1:], "nobody"], strict=True)
    ]
    answer = [word for fact in facts[start:] for word in fact]
    rng.shuffle(facts)
    context = ["rules", ":", *(word for fact in facts for word in fact)]
    return context, ["walk", ":", chain[start], "?", "answer", ":"], answer


def derive(rng: Random, length: int) -> Program:
    """Write a program of sums in random order and carry out all its steps.

    Step k takes the result of a random earlier step and adds 1, 2 or 3, modulo 10: small enough
    for a lucky reader to be partly right while it learns. At most `length` words in all.
    """
    steps = max(1, min(len(STEPS) - 1, (length - 16) // 24))
    first = rng.randrange(len(STEPS) - steps)
    names = STEPS[first : first + steps + 1]
    values = [0]
    facts = [[names[0], "is", "0", "."]]
    answer: list[str] = []
    for step in range(1, steps + 1):
        earlier, more = rng.randrange(step), rng.randint(1, 3)
        values.append((values[earlier] + more) % 10)
        takes = [names[step], "takes", names[earlier], "."]
        adds = [names[step], "adds", str(more), "."]
        facts += [takes, adds]
        answer += [*takes, *adds, names[earlier], "is", str(values[earlier]), "."]
        answer += [names[step], "is", str(values[step]), "."]
    rng.shuffle(facts)
    context = ["program", ":", *(word for fact in facts for word in fact)]
    question = ["question", ":", names[1], "all", names[-1], "?", "answer", ":"]
    return context, question, answer
