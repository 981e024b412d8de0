"""What the state machines of the engine share: requests that are stepped and taken out."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from keyhole.config import SamplingParams
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence
from tests.policies.recording import run

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class RequestsMachine(RuleBasedStateMachine):
    """A machine sets `engine` and `requests` in its first rule, and adds rules of its own."""

    engine: Engine
    requests: list[Sequence]
    #: Whether there is no memory for more pages.
    is_full = False

    def add(self, text: list[int], more: int) -> None:
        params = SamplingParams(max_tokens=more, **GREEDY)
        self.requests.append(self.engine.add(text, params, keep_logits=True))

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(1, 15))
    def run(self, count: int) -> None:
        for _ in range(count):
            ended = {one for one in self.requests if one.error is not None}
            self.engine.step()
            self.engine.check_integrity()
            for one in self.requests:
                assert one.error is None or one in ended or self.is_full, one.error
            self.after_step()

    def after_step(self) -> None:
        """What must hold after every step."""

    @precondition(lambda self: self.engine.has_work)
    @rule(number=st.integers(0, 99))
    def leave(self, number: int) -> None:
        left = [request for request in self.requests if not request.is_finished]
        self.engine.abort(left[number % len(left)])

    def compare_with(self, plain: Engine) -> None:
        """Every request that ended by itself has the logits that it has alone in `plain`."""
        for request in self.requests:
            if request.finish_reason == "length":
                params = dataclasses.replace(request.params, max_tokens=1)
                alone = plain.add(request.prompt, params, given=request.generated, keep_logits=True)
                run(plain)
                found, wanted = torch.stack(request.logits), torch.stack(alone.logits)
                assert (found - wanted[: len(found)]).abs().max() <= 1e-4
