"""Answers the plain-English tasks by reading their prompts, knowing nothing of how they were made.

Each reader gets the prompt alone and gives what a model should write.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable


def niah(prompt: str) -> str:
    said: dict[str, list[str]] = {}
    for key, value in re.findall(r"A magic \w+ that belongs to (\S+) is ([\w-]+)\.", prompt):
        said.setdefault(key, []).append(value)
    asked = re.findall(r"What .* belongs? to (.*) in the text above\?", prompt)[-1]
    keys = re.split(r", and |, ", asked)
    return ", ".join(value for key in keys for value in said[key])


def vt(prompt: str) -> str:
    asked = re.findall(r"have the value (\d+)\?", prompt)[-1]
    text = prompt[prompt.rindex("Keep track") :]
    has: dict[str, str] = {}
    for name, old, value in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))", text):
        has[name] = has[old] if old else value
    return " ".join(name for name, value in has.items() if value == asked)


def cwe(prompt: str) -> str:
    text = prompt[prompt.rindex("Here is a numbered list") :].partition("\nQuestion:")[0]
    words = Counter(re.findall(r"\d+\. (\w+)", text))
    return " ".join(word for word, _ in words.most_common(10))


def fwe(prompt: str) -> str:
    words = re.findall(r"\b[a-z]{6}\b", prompt.partition("frequent ones. ")[2].partition("\n")[0])
    return ", ".join(word for word, _ in Counter(words).most_common(3))


def articles(prompt: str) -> str:
    question = prompt[prompt.rindex("Question: ") :]
    name = r"([A-Z]\w+(?: [A-Z]\w+)?)"
    if asked := re.search(f"the town where {name} was born", question):
        (town,) = re.findall(rf"{asked[1]} was born in the town of (\w+)\.", prompt)
    elif asked := re.search(r"through (\w+)\?|Who founded (\w+)\?", question):
        town = asked[1] or asked[2]
    if teacher := re.search(f"the teacher of {name}", question):
        (found,) = re.findall(f"The teacher of {teacher[1]} was {name}", prompt)
    elif "river" in question:
        (found,) = re.findall(rf"river that flows through {town} is the (\w+)\.", prompt)
    else:
        (found,) = re.findall(f"{town} was founded by {name}", prompt)
    return str(found)


def key_value(prompt: str) -> str:
    pairs = json.loads(prompt[prompt.index("{") : prompt.index("}") + 1])
    return str(pairs[re.findall(r'Key: "([^"]+)"', prompt)[-1]])


def passkey(prompt: str) -> str:
    return re.findall(r"The passkey is (\d+)\.", prompt)[0]


def walk(prompt: str) -> str:
    text = prompt[prompt.rindex("Rules:") :]
    follows = dict(re.findall(r"(\w+) follows (\w+)\.", text))
    name = re.findall(r"Walk from (\w+)\.", text)[-1]
    steps = []
    while name != "nobody":
        steps.append(f"{name} follows {follows[name]}.")
        name = follows[name]
    return " ".join(steps)


def derive(prompt: str) -> str:
    text = prompt[prompt.rindex("Rules:") :]
    takes = dict(re.findall(r"(\w+) takes (\w+)\.", text))
    adds = dict(re.findall(r"(\w+) adds (\d)\.", text))
    value = {name: int(number) for name, number in re.findall(r"(\w+) is (\d)\.", text)}
    first, last = re.findall(r"Compute s(\d+) to s(\d+)\.", text)[-1]
    lines = []
    for step in (f"s{number}" for number in range(int(first), int(last) + 1)):
        earlier = takes[step]
        value[step] = (value[earlier] + int(adds[step])) % 10
        lines.append(f"{step} takes {earlier}. {step} adds {adds[step]}.")
        lines.append(f"{earlier} is {value[earlier]}. {step} is {value[step]}.")
    return " ".join(lines)


READERS: dict[str, Callable[[str], str]] = {
    "qa": articles,
    "multi": articles,
    "key": key_value,
} | {reader.__name__: reader for reader in (niah, vt, cwe, fwe, passkey, walk, derive)}


def read(task: str, prompt: str) -> str:
    """What should be written after the prompt of a task in plain English."""
    return READERS[task.partition("_")[0]](prompt)
