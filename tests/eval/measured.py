"""Lines as `keyhole eval` stores them, measured on the bundled model; only recall is made up."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

from keyhole import LLM, SamplingParams
from keyhole.bench import measure
from keyhole.eval.policy_trace import Recorded, Traced, selection_map
from keyhole.eval.tasks import make_task, token_counter
from keyhole.models.model import Model
from keyhole.policies import make_policy
from keyhole.policies.base import Policy
from keyhole.tokenization import Prompt


def lines(
    model: Model,
    tasks: Sequence[str] = ("tiny_passkey",),
    lengths: Sequence[int] = (256,),
    policies: Sequence[str] = ("delta", "streaming_llm"),
    budgets: Sequence[int] = (64, 128),
    depths: Sequence[float] = (0.1, 0.9),
    samples: int = 1,
    map_layers: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """A line for each task, length, policy and budget; `samples` at each depth."""
    choices: list[tuple[str, int | None]] = [("full", None)]
    choices += [(policy, budget) for policy in policies for budget in budgets]
    about = measure.header("eval", torch.device("cpu")) | {"command": "made in a test"}
    return [
        about | _line(model, task, length, policy, budget, depths, samples, map_layers)
        for task in tasks
        for length in lengths
        for policy, budget in choices
        if budget is None or budget < length
    ]


def _line(
    model: Model,
    task: str,
    length: int,
    policy: str,
    budget: int | None,
    depths: Sequence[float],
    samples: int,
    map_layers: Sequence[int],
) -> dict[str, Any]:
    chosen = make_policy(policy, {} if budget is None else {"token_budget": budget})
    llm = LLM(model, policy=chosen)
    count = token_counter(model.tokenizer)
    placed = task in ("tiny_passkey", "tiny_needle")
    scores, found, wheres = [], [], []
    for depth in depths if placed else [None] * len(depths):
        kind = make_task(task, {"depth": depth} if placed else {})
        for seed in range(samples):
            sample = kind.make(length, seed + (0 if placed else 97 * len(scores)), count)
            params = SamplingParams(max_tokens=sample.max_new_tokens, temperature=0.0)
            result = llm.generate(sample.prompt, params)
            scores.append(kind.score(sample, result.text))
            found.append(result.stats)
            wheres.append(depth)
    maps = []
    if map_layers and budget is not None:
        recorded = record(model, chosen, sample.prompt, max_tokens=sample.max_new_tokens)
        marks = [count(sample.context[: int(at * len(sample.context))]) for at in sample.depths]
        maps = [selection_map(recorded, layer=at, marks=marks).to_json() for at in map_layers]
    steps = [stats.generated_tokens - 1 for stats in found]
    read = sum(stats.kv_bytes_read + stats.other_bytes_read for stats in found)
    settings = {k: v for k, v in dataclasses.asdict(llm.policy).items() if v is not None}
    share = _mean([stats.attended_fraction or 0 for stats in found])
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "model": "keyhole-tiny",
        "task": task,
        "length": length,
        "setup": "prompt",
        "policy": policy,
        "settings": settings,
        "budget": budget,
        "samples": len(scores),
        "score": _mean(scores),
        "scores": scores,
        "depths": wheres if placed else None,
        "tokens_prompt": _mean([stats.prompt_tokens for stats in found]),
        "tokens_generated": _mean([stats.generated_tokens for stats in found]),
        "read_share": share,
        "bytes_per_step": read / max(1, sum(steps)),
        "step_ms": _mean([stats.step_ms or 0 for stats in found]),
        "peak_bytes": None,
        "recall_per_layer": [1.0, 1.0, *(round(share ** (1 / n), 4) for n in (3, 5, 9, 14))],
        "selection_maps": maps or None,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def record(
    model: Model, policy: Policy, prompt: Prompt, *, max_tokens: int, page_size: int = 16
) -> Recorded:
    """Answers a prompt greedily and records what every layer read."""
    traced = Traced(policy)
    llm = LLM(model, policy=traced, page_size=page_size)
    result = llm.generate(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    return Recorded(traced.trace, result.stats.prompt_tokens)
