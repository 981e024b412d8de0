"""An operation's signature is its twin's; every backend's function has the same one."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from keyhole.kernels import cpu, cpu_attention, cpu_layers, operations, triton
from keyhole.kernels.composed import low_rank

OPERATIONS = {
    name: found
    for module in (operations, low_rank)
    for name, found in vars(module).items()
    if getattr(found, "__code__", None) is operations.append.__code__
}


def backends(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions of an operation's name in the modules of backends."""
    for module in (cpu, cpu_attention, cpu_layers):
        if inspect.isfunction(getattr(module, name, None)):
            yield module.__name__, getattr(module, name)
    if triton.has(name) and importlib.util.find_spec("triton") is not None:
        yield triton.__name__, triton.operation(name)


def signature(function: Callable[..., Any]) -> list[tuple[str, Any, Any, Any]]:
    """Name, kind, default and annotation of each parameter, and the annotation of the result."""
    found = inspect.signature(function)
    parameters = [(p.name, p.kind, p.default, p.annotation) for p in found.parameters.values()]
    return [*parameters, ("returns", None, None, found.return_annotation)]


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_a_backend_has_the_signature_of_the_twin(name: str) -> None:
    twin = inspect.unwrap(OPERATIONS[name])
    assert twin.__module__.startswith(("keyhole.kernels.reference", "keyhole.kernels.composed"))
    for backend, function in backends(name):
        assert signature(function) == signature(twin), backend


def test_most_operations_have_a_backend_besides_the_reference() -> None:
    assert len(OPERATIONS) > 12
    assert sum(any(backends(name)) for name in OPERATIONS) > len(OPERATIONS) * 3 // 4


def test_a_backend_computes_no_operation_that_does_not_exist() -> None:
    assert set(triton._MODULES) <= set(OPERATIONS)
