"""How right an answer is: the scores of RULER, of question answering, and of the bundled world.

string_match_all and string_match_part are those of RULER (Hsieh et al., COLM 2024; its
`eval/synthetic/constants.py` and the post-processing in `eval/evaluate.py`), of one sample and
from 0 to 1 instead of per cent. token_f1 is SQuAD's (Rajpurkar et al., EMNLP 2016), which LongBench
uses for its question answering; exact_match is its other score.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def string_match_all(answers: Sequence[str], generated: str) -> float:
    """Share of the answers that stand somewhere in the text, whatever their case."""
    text = _cleaned(generated)
    return sum(answer.lower() in text for answer in answers) / len(answers)


def string_match_part(answers: Sequence[str], generated: str) -> float:
    """1 if any of the answers stands somewhere in the text, whatever its case; else 0."""
    text = _cleaned(generated)
    return float(any(answer.lower() in text for answer in answers))


def first_number(answers: Sequence[str], generated: str) -> float:
    """1 if the first number in the text is the answer, digit by digit; else 0."""
    found = re.search(r"\d+", generated)
    return float(found is not None and found[0] == answers[0])


def token_f1(answers: Sequence[str], generated: str) -> float:
    """Harmonic mean of precision and recall of words, for the answer that it is best for.

    Case, punctuation and articles do not count; words count as often as they stand there.
    """
    return max(_f1(_normal(answer), _normal(generated)) for answer in answers)


def exact_match(answers: Sequence[str], generated: str) -> float:
    """1 if the text is one of the answers, case, punctuation and articles aside; else 0."""
    return float(any(_normal(answer) == _normal(generated) for answer in answers))


def begins_with(answer: str, generated: str) -> float:
    """1 if the text is right to the answer's last word, whatever follows; else 0."""
    words = answer.split()
    return float(generated.split()[: len(words)] == words)


def share_before_first_error(steps: Sequence[object], generated: Sequence[object]) -> float:
    """Share of the steps that were written before the first wrong or missing one."""
    right = 0
    for want, got in zip(steps, generated, strict=False):
        if want != got:
            break
        right += 1
    return right / len(steps)


def _cleaned(generated: str) -> str:
    return _CONTROL.sub("\n", generated.strip()).strip().lower()


def _normal(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _f1(right: list[str], wrote: list[str]) -> float:
    common = (Counter(right) & Counter(wrote)).total()
    return 2 * common / (len(right) + len(wrote)) if common else 0.0
