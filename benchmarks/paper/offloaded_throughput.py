"""Throughput of a policy whose layers are offloaded as sequences grow.

SpeContext (section 6) fits more requests that way. Engine and cache are created for one length at
a time, with the number of offloaded layers that the plan gives for it. The memory of the resident
layers and the permitted host memory bound the number of requests.

With random weights, selections change at every step; with real ones, more than 80 % of a selection
was in the one before (SpeContext, section 5.2). The queries of the head used here therefore hardly
change; the share of selected tokens that were resident is counted and stored with the results.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.offload.loading import WARM_UP, ForcedText, Loading, timed
from benchmarks.paper.settings import OFFLOADED_SYSTEMS, ThroughputSettings
from keyhole.bench import decode
from keyhole.bench.model import RandomKV, prompts, release_memory
from keyhole.bench.settings import PAGE_SIZE
from keyhole.cache.prefetch import Prefetcher
from keyhole.errors import CapacityError, ConfigError
from keyhole.models.model import Model
from keyhole.policies import make_policy
from keyhole.policies.base import Policy
from keyhole.retrieval.head import RetrievalHead

# Tokens after a prompt whose logits are compared with those of an engine without offloading.
_COMPARED = 3
_TOLERANCE = 1e-2  # the same numbers, in the same order: 0 is expected


class SteadyHead(RetrievalHead):
    """A random head whose queries are nearly constant.

    Of 2,048 tokens selected among 8,192 to 34,816, 86 to 80 % are selected again in the next step.
    """

    SAME = 0.99
    same: Tensor  # [num_heads, D]

    @classmethod
    def random(
        cls, target: nn.Module, *, inputs: str = "tokens+features", seed: int = 0
    ) -> SteadyHead:
        """See `RetrievalHead.random`."""
        head = super().random(target, inputs=inputs, seed=seed)
        assert isinstance(head, SteadyHead)
        size = (head.config.num_heads, head.config.head_dim)
        drawn = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        head.register_buffer("same", drawn.to(head.q.weight))
        return head

    def forward(
        self, token_ids: Tensor, positions: Tensor, fused: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `RetrievalHead.forward`."""
        query, key = super().forward(token_ids, positions, fused)
        return self.SAME * self.same + (1 - self.SAME**2) ** 0.5 * query, key


@dataclass(frozen=True, kw_only=True)
class RequestSteps:
    """Steps of all requests at one length.

    hit_rate: share of the selected tokens of offloaded layers that were already resident.
    moved_bytes: per step. error: of one request's logits, against an engine with all layers
    resident.
    """

    step_ms: list[float]
    offloaded_layers: int
    hit_rate: float | None
    moved_bytes: float
    launches: dict[str, Any]
    error: float

    def as_dict(self) -> dict[str, Any]:
        """Offloaded layers, hit rate and moved bytes, for a line of results."""
        names = ("offloaded_layers", "hit_rate", "moved_bytes")
        return {name: getattr(self, name) for name in names}


class OffloadedSystem:
    """One of the systems in OFFLOADED_SYSTEMS. room: bytes left after the model's weights."""

    def __init__(self, name: str, model: Model, settings: ThroughputSettings, room: int) -> None:
        self.name = name
        self._model = model
        self._repeat = settings.decode.repeat
        budget = settings.decode.token_budget
        chosen = {} if budget is None else {"token_budget": budget}
        self._policy: Policy = make_policy(OFFLOADED_SYSTEMS[name], chosen)
        self._head = SteadyHead.random(model.network)
        self._room = room - sum(parameter.nbytes for parameter in self._head.parameters())
        self.requests = self._most(settings)

    def measure(self, length: int) -> RequestSteps:
        """Fills an engine with requests of this length and times their steps.

        DisagreementError if the logits of the first differ from those without offloading.
        """
        model, count = self._model, self.requests
        numbers = RandomKV(model, count, length)
        texts, given = prompts(model, count, length, self._steps(count))
        short = ForcedText(prompt=texts[0], answer=given[:_COMPARED])
        expected = self._logits_above(numbers, short)
        with tempfile.TemporaryDirectory() as folder, self._loading(folder, count) as system:
            # A cache doubles as it grows; offloaded, it would take twice the host memory needed.
            system.engine.cache.max_pages = self._pages(count, length)
            system.fill(numbers, texts)
            found = system.logits(short)
            error = decode.check(self.name, [found], [expected], _TOLERANCE)
            system.start(*(ForcedText(prompt=text, answer=given) for text in texts))
            times, traffic = timed({self.name: system}, self._repeat, model.device)
            loaded, launched = traffic[self.name], system.launches(self.name)
            below = system.offloaded_layers
        assert loaded is not None
        return RequestSteps(
            step_ms=times[self.name],
            offloaded_layers=below,
            hit_rate=loaded.hit_rate,
            moved_bytes=loaded.moved_bytes / self._repeat,
            launches=launched,
            error=error,
        )

    def _logits_above(self, numbers: RandomKV, text: ForcedText) -> Tensor:
        with Loading(None, self._model, self._policy, self._head, "") as above:
            above.fill(numbers, [text.prompt])
            found = above.logits(text)
        del above
        release_memory()  # for the requests
        return found

    def _loading(self, folder: str, requests: int) -> Loading:
        where = (self._model, self._policy, self._head, folder, self._room)
        return Loading(Prefetcher, *where, requests=requests)

    def _most(self, settings: ThroughputSettings) -> int:
        """The most whole requests that fit, with some layers offloaded, into device and host."""
        length = settings.prompt + settings.answer
        text_bytes = length * self._model.geometry(PAGE_SIZE).token_bytes
        counts = range(1, settings.host_memory // text_bytes + 1)
        return max(itertools.takewhile(lambda count: self._fits(count, length), counts), default=0)

    def _fits(self, requests: int, length: int) -> bool:
        if self._room <= 0:
            return False
        try:
            with (
                tempfile.TemporaryDirectory() as folder,
                self._loading(folder, requests) as system,
            ):
                offloader = system.engine.offloader
                assert offloader is not None
                most = max(offloader.plan.capacities)
        except (CapacityError, ConfigError):  # the buffers do not fit, or leave space for no page
            return False
        return most >= self._pages(requests, length)

    def _steps(self, requests: int) -> int:
        """Tokens after the prompt, for requests that begin one after the other."""
        return requests + WARM_UP + self._repeat + 1

    def _pages(self, requests: int, length: int) -> int:
        """Pages for texts, steps, a copy of a cached page each, and one reserved page."""
        each = -(-(length + self._steps(requests)) // PAGE_SIZE) + 1
        return requests * each + 1
