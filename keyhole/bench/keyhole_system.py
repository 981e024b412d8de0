"""Our engine as a system of the decode benchmark, with a prompt that is known already.

The engines of all policies share one cache: its pages are written once, not computed, and given to
each engine as the start of a prompt that it has seen before. New tokens go into pages of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Several
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from keyhole.bench import measure
from keyhole.bench.model import RandomKV
from keyhole.bench.settings import PAGE_SIZE, brings_budget
from keyhole.cache.pages import PageCache, bytes_per_page
from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.engine import Engine
from keyhole.engine.head_runner import HeadRunner
from keyhole.engine.sequence import Sequence
from keyhole.models.loading import Model
from keyhole.policies import make_policy
from keyhole.policies.base import Policy
from keyhole.retrieval.head import RetrievalHead


class KeyholeSystem:
    """One policy's engine over a shared cache. token_budget: None for the policy's own."""

    def __init__(
        self,
        name: str,
        model: Model,
        cache: PageCache,
        batch: int,
        head: RetrievalHead | None,
        token_budget: int | None = None,
    ) -> None:
        self.name = name
        config = EngineConfig(max_batch=batch, page_size=PAGE_SIZE)
        policy = _policy(name, token_budget)
        head = head if policy.wants_head else None
        self.engine = Engine(model, policy, config, cache, head)
        self.sequences: list[Sequence] = []
        self._replayed = 0  # before the steps that count

    def logits(self, prompts: list[list[int]], given: list[int]) -> Tensor:
        """Logits [B, 1 + len(given), vocabulary] after the prompts and after each given token."""
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        sequences = [
            self.engine.add(prompt, params, given=given, keep_logits=True) for prompt in prompts
        ]
        while self.engine.has_work:
            self.engine.step()
        return torch.stack([torch.stack(sequence.logits) for sequence in sequences])

    def start(self, prompts: list[list[int]], steps: int) -> None:
        """Requests that live for `steps` steps at least."""
        params = SamplingParams(max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
        self.sequences = [self.engine.add(prompt, params) for prompt in prompts]
        self._replayed = self.engine.replayed_steps

    def step(self) -> None:
        """One token for every request, scheduling and sampling included."""
        done = self.engine.step()
        assert len(done) == len(self.sequences)

    def rest(self) -> None:
        """Nothing: what a step has written is the past of the next one."""

    def cost(self) -> dict[str, Any]:
        """What one step read, summed over the requests, the policy as it was resolved, launches.

        NotRecordedError if its steps should have been repeated as CUDA graphs and were not.
        """
        stats = [sequence.stats() for sequence in self.sequences]
        steps = [len(sequence.step_ms) for sequence in self.sequences]
        fractions = [s.attended_fraction for s in stats if s.attended_fraction is not None]
        return {
            "policy": {"name": self.engine.policy.name} | asdict(self.engine.policy),
            "kv_bytes": sum(s.kv_bytes_read / n for s, n in zip(stats, steps, strict=True)),
            "other_bytes": sum(s.other_bytes_read / n for s, n in zip(stats, steps, strict=True)),
            "attended_fraction": statistics.mean(fractions),
            "launches": measure.checked(
                self.name, self.engine, self._replayed, self.engine.model.device
            ),
        }


class Pages:
    """The shared cache, and the pages in it that hold the prompts."""

    def __init__(
        self,
        model: Model,
        policies: Several[str],
        batch: int,
        context: int,
        steps: int,
        token_budget: int | None = None,
    ) -> None:
        """`steps`: the most that any engine adds to a prompt. token_budget: as `KeyholeSystem`."""
        geometry, data = model.geometry(PAGE_SIZE), _page_data(model, policies)
        self.cache = PageCache(
            geometry,
            _num_pages(policies, batch, context, steps),
            dtype=model.dtype,
            device=model.device,
            page_data=data,
            common=_head_data(model, policies),
        )
        # Random weights have no head that was trained for them; what a step costs is the same.
        head = RetrievalHead.random(model.network) if self.cache.common else None
        self.ours = [
            KeyholeSystem(name, model, self.cache, batch, head, token_budget) for name in policies
        ]
        pages = self.cache.allocate(batch * context // PAGE_SIZE)
        assert pages is not None
        self._pages = torch.tensor(pages, device=model.device)

    def fill(self, numbers: RandomKV) -> None:
        """Writes keys and values of all prompts, and what the policies keep of them."""
        cache = self.cache
        for tensor in cache.common.values():
            tensor[self._pages] = torch.randn_like(tensor[self._pages])
        for sequence, pages in enumerate(self._pages.view(numbers.batch, -1)):
            filled = torch.full_like(pages, PAGE_SIZE)
            for layer in range(numbers.num_layers):
                for stored, draw in ((cache.keys, numbers.keys), (cache.values, numbers.values)):
                    tensor = draw(layer, sequence)
                    stored[layer][pages] = tensor.unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1)
                for own in self.ours:
                    policy = own.engine.policy
                    policy.on_append(cache.keys[layer], cache.data[layer], pages, filled)

    def know(self, prompts: list[list[int]]) -> None:
        """Hands the pages over to the engines, as known starts of these prompts."""
        parts = self._pages.view(len(prompts), -1).tolist()
        for own in self.ours:
            assert own.engine.prefix is not None
            for prompt, pages in zip(prompts, parts, strict=True):
                own.engine.prefix.insert(prompt[:-1], pages, len(prompt))
        self.cache.release(self._pages.tolist())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the cache."""
        return self.cache.capacity * self.cache.page_bytes


def needed_bytes(model: Model, policies: Several[str], batch: int, context: int, steps: int) -> int:
    """What `Pages` takes, before it is made."""
    data = [*_page_data(model, policies), _head_data(model, policies)]
    page_bytes = bytes_per_page(model.geometry(PAGE_SIZE), data)
    return _num_pages(policies, batch, context, steps) * page_bytes


def _policy(name: str, token_budget: int | None) -> Policy:
    """A policy, with that budget if it has one at all and brings none of its own."""
    policy = make_policy(name)
    has_budget = "token_budget" in {field.name for field in fields(policy)}
    if token_budget is None or not has_budget or brings_budget(name):
        return policy
    return make_policy(name, {"token_budget": token_budget})


def _num_pages(policies: Several[str], batch: int, context: int, steps: int) -> int:
    """Pages for the prompts, for what every engine adds to them, and for copies of the prompts."""
    more = -(-(steps + 1) // PAGE_SIZE) + 1
    copies = sum(not make_policy(name).shares_pages for name in policies)
    # And one that is nobody's, where steps are recorded.
    return batch * ((1 + copies) * (context // PAGE_SIZE) + len(policies) * more) + 1


def _page_data(model: Model, policies: Several[str]) -> list[dict[str, tuple[int, ...]]]:
    """What all policies together keep beside a page, layer by layer."""
    geometry = model.geometry(PAGE_SIZE)
    resolved = [make_policy(name).resolve(geometry) for name in policies]
    data: list[dict[str, tuple[int, ...]]] = [{} for _ in geometry.layers]
    for policy in resolved:
        for names, layout in zip(data, geometry.layers, strict=True):
            own = policy.page_data(layout, PAGE_SIZE)
            assert all(names.get(name, shape) == shape for name, shape in own.items())
            names |= own
    return data


def _head_data(model: Model, policies: Several[str]) -> dict[str, tuple[int, ...]]:
    """What a retrieval head keeps in a page, if a policy wants one."""
    if not any(make_policy(name).wants_head for name in policies):
        return {}
    return HeadRunner.page_data(RetrievalHead.random(model.network).config, PAGE_SIZE)
