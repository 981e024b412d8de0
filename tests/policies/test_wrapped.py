"""A wrapper forwards every hook, so a model under it behaves as under the wrapped policy."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import MagicMock, create_autospec

import pytest

from keyhole import Delta, RaaS, SpeContext
from keyhole.eval.policy_trace import PolicyProxy, Traced
from keyhole.policies.base import Policy
from tests.policies.recording import Recording

#: All but `as_published`, which belongs to a class: a wrapper is not a method.
HOOKS = [
    name
    for name, _ in inspect.getmembers(Policy, callable)
    if not name.startswith("_") and name != "as_published"
]
#: What a wrapper says for itself, as it observes on the host: see below.
OWN = ("capturable", "speculative")
VARIABLES = [n for n in Policy.__annotations__ if not n.startswith("_") and n not in OWN]
WRAPPERS = [PolicyProxy, Traced, Recording]


@dataclass(frozen=True, kw_only=True)
class Odd(Policy):
    """No class variable as it is in `Policy`."""

    name: ClassVar[str] = "odd"
    dense: ClassVar[bool] = True
    wants_head: ClassVar[bool] = True
    wants_gate: ClassVar[bool] = True
    shifts_keys: ClassVar[bool] = True

    def on_queries(self, *_: Any) -> None: ...


def test_there_is_something_to_hand_on() -> None:
    assert {"select", "after_step", "page_limit", "selection_heads"} <= set(HOOKS)
    assert VARIABLES == [
        "name",
        "dense",
        "wants_head",
        "wants_gate",
        "shifts_keys",
        "shares_pages",
        "page_settings",
        "selects",
        "reads_keys",
        "reads_queries",
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hook", [name for name in HOOKS if name != "resolve"])
def test_every_hook_is_handed_on(wrapper: Any, hook: str) -> None:
    inner = create_autospec(Policy, instance=True)
    for name in VARIABLES:
        setattr(inner, name, None)
    names = list(inspect.signature(getattr(Policy, hook)).parameters)[1:]
    # No layer dropped or evicted anything, and nothing is read.
    given = {name: MagicMock(name=name) for name in names} | {"layer": 3}
    if "step" in given:
        given["step"] = MagicMock(retained=None, kept_tokens=None)
    silent = ("select", "before_step", "on_append", "on_prompt_queries", "on_queries", "on_scores")
    getattr(inner, hook).return_value = wanted = None if hook in silent else MagicMock()
    assert getattr(wrapper(inner), hook)(*(given[name] for name in names)) is wanted
    called = getattr(inner, hook)
    called.assert_called_once()
    bound = inspect.signature(getattr(Policy, hook)).bind(None, *called.call_args.args)
    assert list(bound.arguments.values())[1:] == [given[name] for name in names]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_settled_is_the_policy_inside(wrapper: Any) -> None:
    inner, settled = MagicMock(spec=Policy, name="inner"), Odd()
    inner.resolve.return_value = settled
    for name in VARIABLES:
        setattr(inner, name, None)
    before = wrapper(inner)
    after = before.resolve("geometry")
    inner.resolve.assert_called_once_with("geometry")
    assert after.inner is settled
    assert all(getattr(after, name) == getattr(settled, name) for name in VARIABLES)
    if wrapper is Traced:
        assert after.trace is before.trace


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_who_looks_on_sees_every_step(wrapper: Any) -> None:
    """A step that is repeated from a recording calls no hooks."""
    assert Delta.capturable is True
    assert isinstance(wrapper(Delta()).capturable, str)
    assert Delta.speculative is True
    assert isinstance(wrapper(Delta()).speculative, str)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_settings_are_those_of_the_policy_inside(wrapper: Any) -> None:
    """By these the engine finds a head, and how much an offloaded layer must hold."""
    assert wrapper(SpeContext(head="somewhere")).head == "somewhere"
    assert wrapper(Delta(token_budget=77)).token_budget == 77
    assert getattr(wrapper(RaaS()), "head", None) is None
    assert copy.deepcopy(wrapper(Odd())).inner == Odd()
