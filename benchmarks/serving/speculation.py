"""Tokens per second with an EAGLE-3 draft, compared with full attention without one, on a CPU at
batch 1.

    python -m benchmarks.serving.speculation

The model is a Llama of a given shape, the draft one layer with a vocabulary of 32,000 of its
tokens. Both have random weights in bfloat16 (`--weights` packs those of the model), and the cache
holds random keys and values. Everything that speculation needs is computed: the draft, the
selection by its attention, and the step over 1 + K rows. Random weights would accept nothing, so
acceptance is simulated: each proposed token in turn counts as right with the probability
`--accept`, regardless of what the model sampled. Published drafts of Llama 3.1 8B reach 0.75 to 0.8
on chat and code.

Three systems take turns, a few steps each: `full`, `full` with the draft, and `spe_context` with
the draft. Targets, with weights in bfloat16: at least 1.8 times the tokens per second of `full` at
2,048 tokens, and at least 2.5 times under `spe_context` at 32,768. One line is added to
benchmarks/results/speculation.jsonl.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence as Tokens
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import benchmarks
from benchmarks import command
from benchmarks.llama_cpp.few_bits import packed_model
from keyhole.bench.model import make_weights
from keyhole.bench.settings import DecodeSettings
from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine import engine as engine_module
from keyhole.engine.engine import Engine
from keyhole.engine.sequence import Sequence
from keyhole.engine.speculation import verifier
from keyhole.engine.speculation.draft_runner import speed_up_draft
from keyhole.models.model import Model
from keyhole.policies import make_policy
from keyhole.retrieval.config import HeadConfig
from keyhole.retrieval.draft import DraftModel, DraftShape
from keyhole.retrieval.head import RetrievalHead
from keyhole.retrieval.target import Target, feature_layers

_DRAFT_VOCABULARY = 32_000
_TARGETS = {2048: ("full+draft", 1.8), 32768: ("spe_context+draft", 2.5)}
#: Untimed steps of every system.
_WARM_UP = 3


def main() -> int:
    """Measures every context, prints and stores the results."""
    parser = command.parser(__doc__)
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument(
        "--weights", choices=("int4", "int8"), help="the model's, packed; default: bfloat16"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[*_TARGETS])
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--accept", type=float, default=0.8, help="of a proposed token")
    parser.add_argument("--token-budget", type=int, default=1024, help="of spe_context")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=6, help="of a system in a round")
    parser.add_argument("--dry", action="store_true", help="store nothing")
    arguments = parser.parse_args()
    settings = DecodeSettings(
        shape=arguments.shape, contexts=tuple(arguments.contexts), device="cpu", dtype="bfloat16"
    )
    weights = make_weights(settings)
    draft = random_draft(weights.keyhole)
    packed = packed_model(weights, arguments.weights) if arguments.weights else None
    model = packed or weights.keyhole
    line = command.header("speculation", "benchmarks.serving.speculation", arguments.note)
    line |= {"settings": vars(arguments), "results": []}
    for context in arguments.contexts:
        result = compare(model, draft, context, arguments)
        line["results"].append(result)
        print(told(result), flush=True)
    if not arguments.dry:
        benchmarks.append(benchmarks.results() / "speculation.jsonl", line)
    return 0


@torch.no_grad()
def random_draft(model: Model) -> DraftModel:
    """A draft like published ones: one layer of the model's width with an equally wide MLP, and
    32,000 tokens.
    """
    target, config = Target.of(model.network), model.network.config
    head_config = HeadConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        inputs="tokens+features",
        feature_size=target.hidden_size,
        feature_layers=feature_layers(target.num_layers),
        rms_norm_eps=1e-6,
        rope_theta=target.rope_theta,
        trained_length=target.max_length,
        objective="random",
    )
    shape = DraftShape(mlp_size=int(config.intermediate_size), vocab_size=_DRAFT_VOCABULARY)
    head = RetrievalHead(head_config, target.embedding)
    draft = DraftModel(head, shape, torch.arange(_DRAFT_VOCABULARY)).eval().requires_grad_(False)
    for parameter in draft.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    return speed_up_draft(draft, model.device)


class DecodedSystem:
    """An engine over a filled cache, and the request that it decodes."""

    def __init__(self, name: str, model: Model, draft: DraftModel, context: int, args: Any) -> None:
        self.name = name
        policy, _, drafts = name.partition("+")
        budget = {"token_budget": args.token_budget} if policy != "full" else {}
        config = EngineConfig(
            max_batch=1,
            draft="eagle3" if drafts else None,
            num_draft_tokens=args.num_draft_tokens,
            memory=int(1.1 * (context + 1024) * (model.geometry(16).token_bytes + 4096)),
        )
        with mock.patch.object(engine_module, "load_draft", return_value=draft):
            self.engine = Engine(model, make_policy(policy, budget), config)
        self.sequence = self._filled(context)
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    @torch.no_grad()
    def _filled(self, context: int) -> Sequence:
        """A request whose prompt is a cached prefix of random keys and values."""
        engine, cache = self.engine, self.engine.cache
        prompt = random.Random(0).choices(range(1000), k=context + 1)
        pages = cache.allocate(context // cache.page_size)
        assert pages is not None, "memory holds the context"
        assert engine.prefix is not None
        for tensor in (*cache.keys, *cache.values, *cache.common.values()):
            assert tensor is not None
            tensor[pages] = torch.randn(tensor[pages].shape).to(tensor.dtype)
        engine.prefix.insert(prompt, pages, context)
        cache.release(pages)
        params = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
        sequence = engine.add(prompt, params)
        engine.step()
        assert sequence.num_cached == context // cache.page_size * cache.page_size
        return sequence

    def run(self, steps: int) -> None:
        """Some steps, timed together."""
        before = len(self.sequence.tokens)
        begin = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        self.seconds.append(time.perf_counter() - begin)
        assert not self.sequence.is_finished, "fewer --rounds or --steps: the answer has ended"
        self.tokens.append(len(self.sequence.tokens) - before)

    def summary(self, steps: int) -> dict[str, Any]:
        """Medians over rounds; for tokens per step the mean, because acceptance is random."""
        ms = [1e3 * seconds / steps for seconds in self.seconds]
        per_step = sum(self.tokens) / (steps * len(self.tokens))
        return {
            "step_ms": statistics.median(ms),
            "step_ms_range": [min(ms), max(ms)],
            "tokens_per_step": per_step,
            "tokens_per_second": 1e3 * per_step / statistics.median(ms),
        }


def compare(model: Model, draft: DraftModel, context: int, args: Any) -> dict[str, Any]:
    """The systems at one context, taking turns."""
    names = ["full", "full+draft", "spe_context+draft"]
    systems = [DecodedSystem(name, model, draft, context, args) for name in names]
    # Every system has the same luck.
    dice = {system.sequence: random.Random(0) for system in systems}

    def replayed(sequence: Sequence, before: int, proposed: Tokens[int]) -> bool:
        made = len(sequence.tokens) - before
        return made <= len(proposed) and dice[sequence].random() < args.accept

    with mock.patch.object(verifier, "_was_right", replayed):
        for system in systems:
            for _ in range(_WARM_UP):
                system.engine.step()
        for _ in range(args.rounds):
            for system in systems:
                system.run(args.steps)
    results = {system.name: system.summary(args.steps) for system in systems}
    base = results["full"]["tokens_per_second"]
    for result in results.values():
        result["times_full"] = result["tokens_per_second"] / base
    line: dict[str, Any] = {"context": context, "systems": results}
    if context in _TARGETS and args.weights is None:
        name, wanted = _TARGETS[context]
        met = results[name]["times_full"] >= wanted
        line["target"] = {"system": name, "times_full": wanted, "met": met}
    return line


def told(result: dict[str, Any]) -> str:
    """The result of a context as text."""
    rows = [f"{result['context']:,} tokens"]
    for name, found in result["systems"].items():
        rows.append(
            f"  {name:18} {found['step_ms']:7.1f} ms a step, "
            f"{found['tokens_per_step']:.2f} tokens, {found['tokens_per_second']:6.2f} tokens/s, "
            f"{found['times_full']:.2f} x full"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    raise SystemExit(main())
