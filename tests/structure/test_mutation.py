"""`make mutation` changes what a function computes, and nothing else."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from tests.mutation import Mutant, changed_code, changed_function

SOURCE = """
LIMIT = 4

class Cache:
    def room(self, size: int) -> bool:
        def fits(number):
            return number < LIMIT
        return fits(size)

room = Cache().room
"""


def mutated(before: str, after: str) -> tuple[types.CodeType, types.CodeType] | None:
    assert before in SOURCE
    changed = SOURCE.replace(before, after)
    return changed_function(*(compile(s, "room.py", "exec") for s in (SOURCE, changed)))


def test_a_function_has_the_changed_code_wherever_it_is_held() -> None:
    names: dict[str, object] = {}
    exec(compile(SOURCE, "room.py", "exec"), names)
    room = names["room"]  # made before, as by `from module import name`
    assert callable(room)
    assert (room(3), room(4)) == (True, False)
    codes = mutated("number < LIMIT", "number <= LIMIT")
    assert codes is not None
    assert codes[0].co_name == "room"  # the outermost
    Mutant(Path("room.py"), 7, "", *codes).apply()
    assert (room(4), room(5)) == (True, False)


def test_a_mutant_of_an_unknown_function_is_an_error() -> None:
    codes = mutated("fits(size)", "fits(-size)")
    assert codes is not None
    with pytest.raises(AssertionError):
        Mutant(Path("nowhere.py"), 8, "", *codes).apply()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("LIMIT = 4", "LIMIT = 5"),
        ("size: int)", "size: float)"),
        ("LIMIT\n        return", "LIMIT  # a comment\n        return"),
        ("(self, size: int)", "(self, size: int = 3)"),
    ],
)
def test_what_runs_at_import_or_means_the_same_is_no_mutant(before: str, after: str) -> None:
    assert mutated(before, after) is None


def test_a_mutant_that_is_no_python_is_left_out() -> None:
    """One among a hundred ended the run: the stars of {**settings} stand for a multiplication."""
    before = "def f(a):\n    return {**a}\n"
    assert changed_code(before, before.replace("**a", "//a"), Path("f.py")) is None
    assert changed_code(before, before.replace("**a", "**a, 1: 2"), Path("f.py")) is not None
