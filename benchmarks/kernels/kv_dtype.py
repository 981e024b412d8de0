"""Keys and values in 8 bits: the time of attention and of a whole step at long contexts.

    python -m benchmarks.kernels.kv_dtype
    python -m benchmarks.kernels.kv_dtype --contexts 32768 --repeat 5

Engines with the same random weights have one cache for each way to store keys and values, all
filled with the same random numbers. First the attention of all layers is timed, then whole decode
steps under `full`; the engines take turns. Weights are in bfloat16, or packed (`--weights`). Adds a
line to benchmarks/results/kv-dtype.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

import benchmarks
from benchmarks import command
from benchmarks.llama_cpp.few_bits import packed_model
from keyhole import kernels
from keyhole.bench import measure
from keyhole.bench.measure import Turn, take_turns
from keyhole.bench.model import RandomKV, make_weights, prompts
from keyhole.bench.settings import PAGE_SIZE, DecodeSettings
from keyhole.bench.systems import KeyholeSystem, Pages
from keyhole.config import KV_DTYPES
from keyhole.kernels import PagedQuery

LINES = benchmarks.results() / "kv-dtype.jsonl"
#: Untimed calls of each system.
_WARM_UP = 2


def main() -> None:
    """Measures every context and prints a row for each way to store keys and values."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--contexts", default="131072", help="tokens, such as 32768,131072")
    parser.add_argument("--repeat", type=int, default=9, help="timed calls of each")
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--kv-dtypes", default=",".join(KV_DTYPES))
    parser.add_argument("--weights", choices=("int4", "int8"), help="packed; default: bfloat16")
    given = parser.parse_args()
    contexts = tuple(int(n) for n in given.contexts.split(","))
    settings = DecodeSettings(
        contexts=contexts, repeat=given.repeat, shape=given.shape, systems=("full",)
    )
    weights = make_weights(settings)
    model = packed_model(weights, given.weights) if given.weights else weights.keyhole
    device = model.device
    results = []
    for context in contexts:
        results += measured(model, context, given.repeat, given.kv_dtypes.split(","))
    line = command.header("kv_dtype", "benchmarks.kernels.kv_dtype", "", device) | {
        "shape": given.shape,
        "weights": given.weights or settings.dtype,
        "read_bytes_per_s": measure.read_bandwidth(device),
        "results": results,
    }
    benchmarks.append(LINES, line)
    for row in results:
        rate = row["kv_bytes"] / row["attention_ms"] / 1e6
        share = 1e9 * rate / line["read_bytes_per_s"]
        print(
            f"{row['context']:>7} {row['kv_dtype']:>5}  {row['kv_bytes'] / 2**20:7.0f} MiB  "
            f"attention {row['attention_ms']:7.1f} ms ({row['attention_speedup']:.2f}x, "
            f"{rate:.1f} GB/s, "
            f"{share:.0%} of a sum's)  step {row['step_ms']:7.1f} ms ({row['step_speedup']:.2f}x)"
        )


def measured(model: Any, context: int, repeat: int, kv_dtypes: list[str]) -> list[dict[str, Any]]:
    """A row for each way to store keys and values; speedups are medians of the rounds' ratios."""
    steps = repeat + _WARM_UP + 1
    numbers = RandomKV(model, 1, context)
    texts, _ = prompts(model, 1, context, 0)
    systems: dict[str, KeyholeSystem] = {}
    for name in kv_dtypes:
        pages = Pages(model, ("full",), 1, context, steps, kv_dtype=name)
        with numbers.filling(1):
            pages.fill(numbers)
        pages.know(texts)
        systems[name] = pages.systems[0]
    device = model.device
    attention = take_turns(
        {name: Turn(call=_attention(system, context)) for name, system in systems.items()},
        repeat + _WARM_UP,
        device,
    )
    for system in systems.values():
        system.start(texts, steps)
    whole = take_turns(
        {name: Turn(call=system.step) for name, system in systems.items()},
        repeat + _WARM_UP,
        device,
    )
    first, rows = kv_dtypes[0], []
    for name, system in systems.items():
        row: dict[str, Any] = {"context": context, "kv_dtype": name}
        row["kv_bytes"] = round(system.cost()["kv_bytes"])
        for kind, times in (("attention", attention), ("step", whole)):
            mine, base = times[name][_WARM_UP:], times[first][_WARM_UP:]
            row[f"{kind}_ms"] = round(statistics.median(mine), 3)
            row[f"{kind}_speedup"] = round(measure.median_ratio(base, mine), 3)
        rows.append(row)
    return rows


def _attention(system: KeyholeSystem, context: int) -> Any:
    """Attention of one new token over the first `context` tokens, in every layer."""
    cache, model = system.engine.cache, system.engine.model
    geometry = cache.geometry
    held = system.engine.prefix
    assert held is not None
    pages = sorted(held.held())[: context // PAGE_SIZE]
    table = torch.tensor([pages], dtype=torch.int32, device=model.device)
    lengths = torch.tensor([context], dtype=torch.int32, device=model.device)
    layout = geometry.layers[0]
    shape = 1, geometry.num_query_heads, layout.key_dim
    query = torch.randn(shape, dtype=model.dtype, device=model.device)
    scale = layout.key_dim**-0.5

    def call() -> None:
        for keys, values in zip(cache.keys, cache.values, strict=True):
            kernels.attend(PagedQuery(query, keys, values, table, lengths), scale=scale)

    return call


if __name__ == "__main__":
    with torch.no_grad():
        main()
