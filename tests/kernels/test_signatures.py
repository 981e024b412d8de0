"""An operation's signature is its schema in `dispatch`; every backend takes just those operands."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from keyhole.kernels import cpu, cpu_attention, dispatch, triton

NAMES = sorted(
    name.removeprefix("keyhole::").removesuffix(".default")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("keyhole::")
)


def schema_names(name: str) -> list[str]:
    schema = getattr(torch.ops.keyhole, name).default._schema
    return [argument.name for argument in schema.arguments]


def backends(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions of an operation's name in the modules of backends."""
    for module in (cpu, cpu_attention):
        if inspect.isfunction(getattr(module, name, None)):
            yield module.__name__, getattr(module, name)
    if triton.has(name) and importlib.util.find_spec("triton") is not None:
        yield triton.__name__, inspect.unwrap(triton.operation(name))


def taken(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_takes_the_operands_of_the_schema(name: str) -> None:
    for backend, function in backends(name):
        assert taken(function) == schema_names(name), backend


def test_most_operations_have_a_backend_beside_the_reference() -> None:
    assert dispatch.backend(torch.device("cpu"))
    assert len(NAMES) > 12
    assert sum(any(backends(name)) for name in NAMES) > len(NAMES) * 3 // 4
