"""Answers the tasks by reading their text, knowing nothing of how it was made."""

from collections import Counter


def sentences(text: str) -> list[list[str]]:
    """Give the sentences as words, without headings such as `document 3 :`."""
    found = [sentence.split(" : ")[-1].split() for sentence in text.split(" .")]
    return [words for words in found if words]


def solve(context: str, question: str) -> str:
    """Give the answer to a framed question."""
    facts: dict[tuple[str, str], list[str]] = {}
    for words in sentences(context):
        if len(words) == 3:
            facts.setdefault((words[0], words[1]), []).append(words[2])
        elif len(words) == 4 and words[0] == "both":
            facts[words[1], words[3]] = facts[words[2], words[3]]
    head, _, asked = question.removesuffix(" ? answer :").partition(" : ")
    match [head, *asked.split()]:
        case ["walk", name]:
            lines = _walk(facts, name)
        case ["walk", name, "twice" | "thrice" as word]:
            lines = _ring(facts, name, word)
        case ["question", "twice" | "thrice", name, *verbs]:
            value = name
            for verb in verbs:
                value = facts[value, verb][0]
            lines = [(name, *verbs, value)]
        case _:
            lines = _answer(facts, asked.split())
    return " ".join([*(" ".join([*line, "."]) for line in lines), "done"])


def _walk(facts: dict[tuple[str, str], list[str]], name: str) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    while name != "nobody":
        lines.append((name, "follows", facts[name, "follows"][0]))
        name = lines[-1][2]
    return lines


def _ring(facts: dict[tuple[str, str], list[str]], start: str, word: str) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    while not lines or lines[-1][2] != start:
        name = reached = lines[-1][2] if lines else start
        for _ in range({"twice": 2, "thrice": 3}[word]):
            reached = facts[reached, "follows"][0]
        lines.append((name, word, reached))
    return lines


def _answer(facts: dict[tuple[str, str], list[str]], asked: list[str]) -> list[tuple[str, ...]]:
    match asked:
        case ["all", entity]:
            verbs = ("keeps", "owns", "inhabits", "serves")
            return [(entity, verb, facts[entity, verb][0]) for verb in verbs]
        case ["most", entity]:
            return [(entity, "likes", Counter(facts[entity, "likes"]).most_common(1)[0][0])]
        case ["count", entity]:
            return [(entity, "likes", str(len(facts[entity, "likes"])))]
        case [first, "all", last]:
            return _derive(facts, int(first[1:]), int(last[1:]))
        case [name, "equals"]:
            lines = []
            while (name, "equals") in facts:
                lines.append((name, "equals", facts[name, "equals"][0]))
                name = lines[-1][2]
            return lines
    if "?" in asked:
        pairs = " ".join(asked).split(" ? ")
        return [(*pair.split(), facts[tuple(pair.split())][0]) for pair in pairs]
    entity, *verbs = asked
    lines = []
    for verb in verbs:
        lines.append((entity, verb, facts[entity, verb][0]))
        entity = lines[-1][2]
    return lines


def _derive(
    facts: dict[tuple[str, str], list[str]], first: int, last: int
) -> list[tuple[str, ...]]:
    values = {f"s{first - 1}": 0}
    lines = []
    for step in (f"s{number}" for number in range(first, last + 1)):
        earlier, more = facts[step, "takes"][0], facts[step, "adds"][0]
        values[step] = (values[earlier] + int(more)) % 10
        lines += [(step, "takes", earlier), (step, "adds", more)]
        lines += [(earlier, "is", str(values[earlier])), (step, "is", str(values[step]))]
    return lines
