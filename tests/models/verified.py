"""`verify` under every policy, or under some of them where it is the weights that are tested."""

from __future__ import annotations

from unittest import mock

import pytest

from keyhole.eval import verify
from keyhole.models.model import Model
from keyhole.policies import available_policies
from tests.effort import THOROUGH

#: Every fourth policy, as none of them knows how weights are stored; all in `make test-all`.
EACH = pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])


def failed(model: Model, every: int = 1 if THOROUGH else 4) -> list[verify.Check]:
    """The checks that the model does not pass, under one in `every` policies."""
    names = list(available_policies())[::every]
    some = {name: available_policies()[name] for name in names}
    with mock.patch.object(verify, "available_policies", return_value=some):
        checks = verify.verify(model)
    assert len(checks) >= 4 + len(some) - 1
    return [check for check in checks if not check.passed]
