"""The memory of an engine under a policy, as the planner's memory model.

`keyhole plan` uses the same functions on a model's files, so its figures are those of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from keyhole.cache.layout import Geometry, ModelSize, memory_model
from keyhole.config import EngineConfig
from keyhole.engine.head_runner import HeadRunner
from keyhole.errors import ConfigError
from keyhole.models import checkpoint
from keyhole.models.model import Model
from keyhole.planner import MemoryModel, MemoryPlan
from keyhole.policies.base import Policy
from keyhole.retrieval.config import HeadConfig

#: Shapes per page by name: of one layer, or of the retrieval head.
PageData = Mapping[str, tuple[int, ...]]


def page_data(
    geometry: Geometry, policy: Policy, head: HeadConfig | None, *, drafts: bool = False
) -> list[PageData]:
    """The side data of a page: the policy's for each layer, then the head's.

    drafts: whether the head is a draft model's, which has values, too.
    """
    data: list[PageData] = [
        {} if layout.window is not None else policy.page_data(layout, geometry.page_size)
        for layout in geometry.layers
    ]
    if head is None:
        return [*data, {}]
    return [*data, HeadRunner.page_data(head, geometry.page_size, drafts=drafts)]


def model_size(model: Model, *selecting: nn.Module | None) -> ModelSize:
    """The size of a loaded model; tied weights and stored buffers count once.

    selecting: its retrieval head, or a whole draft model; its gate; None: without one.
    """
    stored = {x.data_ptr(): x.nbytes for x in model.network.state_dict().values()}
    own = [x for part in selecting if part is not None for x in part.parameters()]
    return ModelSize(
        weight_bytes=sum(stored.values()),
        head_weight_bytes=sum(x.nbytes for x in own),
        vocab_size=model.vocab_size,
        step_numbers=checkpoint.step_numbers(model.network.config),
    )


def movable(geometry: Geometry, policy: Policy) -> tuple[int, ...]:
    """Layers that may be offloaded under a policy, resolved.

    ConfigError if it reads everything of every layer, so that none may.
    """
    layers = policy.offloadable(geometry)
    if not layers or getattr(policy, "token_budget", None) is None:
        raise ConfigError(
            f"policy {policy.name!r} reads all keys of every layer, so none can be offloaded; "
            "offload goes with a policy that selects, such as delta, quest or spe_context"
        )
    return layers


def memory_of(
    geometry: Geometry,
    policy: Policy,
    size: ModelSize,
    data: Sequence[PageData],
    head: HeadConfig | None,
    *,
    layers: tuple[int, ...],
    requests: int,
    prefill_chunk: int,
) -> MemoryModel:
    """The memory model of an engine with this resolved policy; `layers` may be offloaded.

    head: its retrieval head, whose attention weights of all tokens are there at once.
    """
    return memory_model(
        geometry,
        size,
        requests=requests,
        token_budget=getattr(policy, "token_budget", None) or 1,
        prefill_chunk=prefill_chunk,
        page_data=data,
        num_scores=0 if head is None else head.num_heads,
        movable=layers,
        num_heads=policy.selection_heads(geometry),
    )


def make_plan(memory: MemoryModel, config: EngineConfig) -> MemoryPlan:
    """What fits into the memory of `config`, with and without offloaded layers.

    CapacityError if not even the weights do.
    """
    if config.total_memory is not None:
        return MemoryPlan(model=memory, memory=config.total_memory)
    if config.memory is None:
        raise ConfigError(
            "offload needs memory=, the limit of resident keys and values, or total_memory=, the "
            "limit of these, the weights and the activations of a step"
        )
    return MemoryPlan.for_cache(memory, config.memory)
