"""Step time of decoding with a long cache, against transformers with sdpa attention.

    python -m benchmarks.decode
    python -m benchmarks.decode --contexts 2048 --layers 4 --repeat 9

A Llama of the shape of Llama-3.2-1B with random bfloat16 weights; the caches are filled with random
numbers, the same in all, so nothing is prefilled. Before anything is timed, the logits of full
attention and of transformers must agree over the same cache. Then all systems take turns, one
step each, in an order that rotates. The peer is a user's default: `DynamicCache` with sdpa.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Before torch starts its threads: waiting ones must not spin on a core that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from benchmarks import measure
from keyhole.cache.pages import bytes_per_page
from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.core import Engine
from keyhole.engine.sequence import Sequence
from keyhole.models import families
from keyhole.models.attention import NAME
from keyhole.models.loading import Model
from keyhole.policy import make_policy

PEER = "transformers_sdpa"

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "smoke": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}

_PAGE_SIZE = 16
# Keys this wide make attention peaked, so that a wrong page changes the logits visibly.
_KEY_SCALE = 3.0
# Tokens after the prompt whose logits are compared.
_COMPARED = 3
# Relative error (2-norm) that rounding explains: in bfloat16, 16 layers of peaked attention gave
# 0.04 (LOG.md). Unrelated logits differ by about 1.4.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
# The first step ends the prompt, the others bring every system to its pace.
_WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run; see `--help`."""

    contexts: tuple[int, ...] = (2048, 8192, 32768)
    batch: int = 1
    policies: tuple[str, ...] = ("full", "delta", "streaming_llm")
    layers: int | None = None
    shape: str = "llama-3.2-1b"
    dtype: str = "bfloat16"
    device: str = "auto"
    repeat: int = 9


class DisagreementError(RuntimeError):
    """The peer and full attention give different logits: no time of theirs means anything."""


class Ours:
    """An engine whose prompt is known already: its pages were written, not computed."""

    def __init__(self, name: str, model: Model, settings: Settings, context: int) -> None:
        self.name = name
        policy = make_policy(name)
        geometry = model.geometry(_PAGE_SIZE)
        data = [policy.resolve(geometry).page_data(layout) for layout in geometry.layers]
        more = -(-(_COMPARED + _WARM_UP + settings.repeat + 2) // _PAGE_SIZE)
        pages = settings.batch * (context // _PAGE_SIZE + more + 2)
        config = EngineConfig(
            max_batch=settings.batch,
            page_size=_PAGE_SIZE,
            memory=pages * bytes_per_page(geometry, data),
        )
        self.engine = Engine(model, policy, config)
        self.sequences: list[Sequence] = []

    def fill(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Writes [B, Hkv, N, D] into pages of one layer; allocates them with the first layer."""
        cache = self.engine.cache
        if layer == 0:
            pages = cache.allocate(keys.shape[0] * keys.shape[2] // _PAGE_SIZE)
            assert pages is not None
            self._pages = torch.tensor(pages, device=keys.device)
        for stored, tensor in ((cache.keys[layer], keys), (cache.values[layer], values)):
            paged = tensor.unflatten(2, (-1, _PAGE_SIZE)).transpose(1, 2).flatten(0, 1)
            stored[self._pages] = paged
        filled = torch.full_like(self._pages, _PAGE_SIZE)
        data = cache.data[layer]
        self.engine.policy.on_append(cache.keys[layer], data, self._pages, filled)

    def know(self, prompts: list[list[int]]) -> None:
        """Hands the written pages over to the prefix cache, which gives them to these prompts."""
        prefix, pages = self.engine.prefix, self._pages.tolist()
        assert prefix is not None
        for prompt, own in zip(prompts, _split(pages, len(prompts)), strict=True):
            prefix.insert(prompt[:-1], own, len(prompt))
        self.engine.cache.release(pages)

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

    def step(self) -> None:
        """One token for every request, scheduling and sampling included."""
        done = self.engine.step()
        assert len(done) == len(self.sequences)

    def cost(self) -> dict[str, Any]:
        """What one step read, summed over the requests, and the policy as it was resolved."""
        stats = [sequence.stats() for sequence in self.sequences]
        steps = [len(sequence.step_ms) for sequence in self.sequences]
        fractions = [s.attended_fraction for s in stats if s.attended_fraction is not None]
        return {
            "policy": {"name": self.name} | asdict(self.engine.policy),
            "kv_bytes": sum(s.kv_bytes_read / n for s, n in zip(stats, steps, strict=True)),
            "other_bytes": sum(s.other_bytes_read / n for s, n in zip(stats, steps, strict=True)),
            "attended_fraction": statistics.mean(fractions),
        }


class Peer:
    """transformers' own attention and cache over the same weights."""

    name = PEER

    def __init__(self, model: Model) -> None:
        shared = {id(weight): weight for weight in model.network.parameters()}
        self._network = copy.deepcopy(model.network, shared)
        self._network.set_attn_implementation("sdpa")
        self._cache = DynamicCache(config=self._network.config)
        self._token_bytes = model.geometry(_PAGE_SIZE).token_bytes
        self._device = model.device
        self._next = torch.empty(0)
        self._tokens_read: list[int] = []

    def fill(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores [B, Hkv, N, D] as the past of one layer."""
        self._cache.update(keys, values, layer)

    def logits(self, prompts: list[list[int]], given: list[int]) -> Tensor:
        """As `Ours.logits`; the cache is afterwards what it was."""
        tokens = [[prompt[-1], *given] for prompt in prompts]
        rows = [self._forward(torch.tensor(column)) for column in zip(*tokens, strict=True)]
        self._cache.crop(-len(rows))
        return torch.stack(rows, 1).float().cpu()

    def start(self, prompts: list[list[int]], steps: int) -> None:
        """Sets the token that the next step begins with."""
        self._next = torch.tensor([prompt[-1] for prompt in prompts])

    def step(self) -> None:
        """One token for every sequence, greedy."""
        self._next = self._forward(self._next).argmax(-1)
        self._tokens_read.append(self._cache.get_seq_length() * len(self._next))

    def cost(self) -> dict[str, Any]:
        """What one step must read; that `DynamicCache` copies the past as well is not counted."""
        return {
            "policy": None,
            "kv_bytes": statistics.mean(self._tokens_read) * self._token_bytes,
            "other_bytes": 0.0,
            "attended_fraction": 1.0,
        }

    @torch.no_grad()
    def _forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.to(self._device)[:, None]
        out = self._network(input_ids=tokens, past_key_values=self._cache, use_cache=True)
        logits: Tensor = out.logits[:, -1]
        return logits


def make_model(settings: Settings) -> Model:
    """A Llama with random weights, made in place."""
    fields = dict(SHAPES[settings.shape])
    if settings.layers is not None:
        fields["num_hidden_layers"] = settings.layers
    longest = max(settings.contexts) + 1024
    config = LlamaConfig(**fields, max_position_embeddings=longest, tie_word_embeddings=True)
    device = measure.device(settings.device)
    dtype = getattr(torch, settings.dtype)
    torch.manual_seed(0)
    with device:
        network = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    length, reason = families.max_length(config)
    return Model(
        name=settings.shape,
        network=network.eval(),
        tokenizer=None,
        device=device,
        dtype=dtype,
        max_length=length,
        length_reason=reason,
        eos_token_ids=frozenset(),
        defaults={},
    )


def measure_context(
    model: Model, peer: Peer, ours: list[Ours], settings: Settings, context: int
) -> tuple[list[dict[str, Any]], float]:
    """Results of every system at one context, and the relative error of the compared logits."""
    generator = torch.Generator(model.device).manual_seed(context)
    systems: list[Peer | Ours] = [peer, *ours]
    for layer, layout in enumerate(model.geometry(_PAGE_SIZE).layers):
        size = (settings.batch, layout.num_kv_heads, context, layout.key_dim)
        options = {"generator": generator, "dtype": model.dtype, "device": model.device}
        keys, values = _KEY_SCALE * torch.randn(size, **options), torch.randn(size, **options)
        for system in systems:
            system.fill(layer, keys, values)
    tokens = torch.Generator().manual_seed(context)
    size = (settings.batch, context + 1)
    prompts = torch.randint(model.vocab_size, size, generator=tokens).tolist()
    given = torch.randint(model.vocab_size, (_COMPARED,), generator=tokens).tolist()
    for own in ours:
        own.know(prompts)
    error = compare(peer, ours[0], prompts, given, _TOLERANCE[model.dtype])
    times = _times(systems, prompts, settings.repeat, model.device)
    results = []
    for system in systems:
        spent = times[system.name]
        ratios = [a / b for a, b in zip(spent, times[PEER], strict=True)]
        result = {"context": context, "system": system.name, "step_ms": statistics.median(spent)}
        result |= {"ratio_to_peer": statistics.median(ratios), "all_step_ms": spent}
        results.append(result | system.cost())
    return results, error


def compare(
    peer: Peer, dense: Ours, prompts: list[list[int]], given: list[int], tolerance: float
) -> float:
    """Relative error of full attention against the peer; DisagreementError if it is too large."""
    expected, got = peer.logits(prompts, given), dense.logits(prompts, given)
    error = float((got - expected).norm(dim=-1).div(expected.norm(dim=-1)).max())
    if not error <= tolerance:
        raise DisagreementError(f"relative error {error:.2g} of the logits is above {tolerance}")
    return error


def run(settings: Settings) -> dict[str, Any]:
    """Measures every context; the part of a line of results that is this benchmark's own."""
    for context in settings.contexts:
        if context < 1 or context % _PAGE_SIZE:
            raise SystemExit(f"context {context} must be a multiple of {_PAGE_SIZE}")
    model = make_model(settings)
    weight_bytes = sum(w.numel() * w.itemsize for w in model.network.parameters())
    bandwidth = measure.read_bandwidth(model.device)
    # Full attention comes first: it is compared with the peer even if nobody asked for its time.
    names = ["full", *(name for name in settings.policies if name != "full")]
    results: list[dict[str, Any]] = []
    errors = {}
    for context in settings.contexts:
        ours = [Ours(name, model, settings, context) for name in names]
        found, error = measure_context(model, Peer(model), ours, settings, context)
        errors[context] = error
        for result in found:
            moved = weight_bytes + result["kv_bytes"] + result["other_bytes"]
            result["gb_per_s"] = moved / result["step_ms"] / 1e6
            result["bandwidth_share"] = 1e9 * result["gb_per_s"] / bandwidth
        results += [r for r in found if r["system"] in {PEER, *settings.policies}]
        print(measure.table(found, _COLUMNS), flush=True)
    return {
        "settings": asdict(settings) | {"page_size": _PAGE_SIZE, "warm_up": _WARM_UP},
        "parameters": sum(w.numel() for w in model.network.parameters()),
        "weight_bytes": weight_bytes,
        "read_bytes_per_s": bandwidth,
        "relative_error": errors,
        "results": results,
    }


_COLUMNS = (
    "context",
    "system",
    "step_ms",
    "ratio_to_peer",
    "kv_bytes",
    "attended_fraction",
    "gb_per_s",
    "bandwidth_share",
)


def _times(
    systems: list[Peer | Ours], prompts: list[list[int]], repeat: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of every step after the warm-up, by system."""
    for system in systems:
        system.start(prompts, _WARM_UP + repeat)
    times: dict[str, list[float]] = {system.name: [] for system in systems}
    for turn in range(_WARM_UP + repeat):
        first = turn % len(systems)
        for system in systems[first:] + systems[:first]:
            times[system.name].append(measure.time_ms(system.step, device))
    return {name: spent[_WARM_UP:] for name, spent in times.items()}


def _split(items: list[int], parts: int) -> list[list[int]]:
    size = len(items) // parts
    return [items[i * size : (i + 1) * size] for i in range(parts)]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument("--contexts", type=_numbers, default=Settings.contexts, help="tokens: a,b,c")
    made.add_argument("--batch", type=int, default=Settings.batch, help="sequences in a step")
    made.add_argument("--policies", type=_names, default=Settings.policies, help="names: a,b,c")
    made.add_argument("--layers", type=int, help="fewer layers than the shape has")
    made.add_argument("--shape", choices=SHAPES, default=Settings.shape)
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default=Settings.dtype)
    made.add_argument("--device", default=Settings.device, help="auto, cpu, cuda")
    made.add_argument("--repeat", type=int, default=Settings.repeat, help="timed steps")
    made.add_argument("--note", default="", help="what a reader should know of this run")
    made.add_argument(
        "--output", type=Path, default=measure.ROOT / "benchmarks/results/decode.jsonl"
    )
    return made


def main() -> None:
    """Measures and appends one line to the output."""
    given = vars(parser().parse_args())
    output, note = given.pop("output"), given.pop("note")
    settings = Settings(**given)
    line = measure.header("decode", measure.device(settings.device), note)
    line |= run(settings)
    measure.append(output, line)


if __name__ == "__main__":
    main()
