"""The names of the cache in transformers' modules and outputs, which differ between versions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from keyhole.cache.argument import cache_argument, cache_field


class New(nn.Module):
    def forward(self, hidden_states: Any, cache: Any = None, **named: Any) -> Any: ...


class Old(nn.Module):
    def forward(self, hidden_states: Any, past_key_values: Any = None) -> Any: ...


class Recurrent(nn.Module):
    def forward(self, hidden_states: Any, cache_params: Any = None) -> Any: ...


def translating(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **named: Any) -> Any: ...

    return wrapper


class Wrapped(nn.Module):
    @translating
    def forward(self, hidden_states: Any, cache: Any = None) -> Any: ...


class Unknown(nn.Module):
    def forward(self, *args: Any, **named: Any) -> Any: ...


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (New, "cache"),
        (Old, "past_key_values"),
        (Recurrent, "cache_params"),
        (Wrapped, "cache"),
        (Unknown, "past_key_values"),
    ],
)
def test_a_module_takes_it_by_its_own_name(cls: type[nn.Module], name: str) -> None:
    assert cache_argument(cls()) == name


@dataclass
class NewOutput:
    logits: Any = None
    cache: Any = None


@dataclass
class OldOutput:
    logits: Any = None
    past_key_values: Any = None


def test_an_output_has_it_in_its_own_field() -> None:
    assert cache_field(NewOutput()) == "cache"
    assert cache_field(OldOutput()) == "past_key_values"
