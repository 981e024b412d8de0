"""Steps with quantised weights, in turns with those in bfloat16 and with llama.cpp."""

from __future__ import annotations

from typing import Any

import pytest

import benchmarks
from benchmarks.llama_cpp import few_bits, worker
from keyhole.bench.settings import DecodeSettings

LLAMA = ("llama_cpp", "llama_cpp_flash")


def measured(systems: tuple[str, ...]) -> dict[str, Any]:
    settings = DecodeSettings(
        contexts=(64,), shape="smoke", device="cpu", repeat=2, layers=2, systems=systems
    )
    return few_bits.run(settings, lambda results, notes: None)


def test_engines_take_turns() -> None:
    line = measured(("full", "delta"))
    found = {result["system"]: result for result in line["results"]}
    assert list(found) == ["full, bfloat16", "full, int8", "full, int4", "delta, int4"]
    assert all(len(result["all_step_ms"]) == 2 for result in found.values())
    assert found["full, bfloat16"]["ratio"] == 1.0
    sizes = [found[f"full, {form}"]["weight_gib"] for form in ("int4", "int8", "bfloat16")]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] / 2
    assert line["bars"] == []  # other lengths


@pytest.mark.slow
def test_llama_cpp_packs_the_same_weights() -> None:
    if not (benchmarks.ROOT / worker.ENVIRONMENT / "bin/python").exists():
        pytest.skip("needs what `make bench-peers` sets up")
    line = measured((*LLAMA, "full"))
    systems = [result["system"] for result in line["results"]]
    assert [name for name in systems if "Q4_0" in name] == [f"{name}, Q4_0" for name in LLAMA]
    assert "version" in line["llama_cpp"]


def result(context: int, system: str, ratio: float, beside: str | None) -> dict[str, Any]:
    return {"context": context, "system": system, "ratio": ratio, "beside": beside}


def test_the_faster_setting_of_llama_cpp_counts() -> None:
    """And what took turns with it, not the best of either group."""
    results = [
        result(2048, "full, int4", 0.4, LLAMA[0]),
        result(2048, "llama_cpp, Q4_0", 0.5, LLAMA[0]),
        result(2048, "full, int4", 0.48, LLAMA[1]),
        result(2048, "llama_cpp_flash, Q4_0", 0.32, LLAMA[1]),
        result(32768, "delta, int4", 0.3, LLAMA[0]),
        result(32768, "llama_cpp, Q4_0", 0.75, LLAMA[0]),
        result(32768, "full, int4", 0.5, LLAMA[0]),
    ]
    bars = {
        bar["bar"]: (round(bar["value"], 3), bar["met"]) for bar in few_bits.targets(results, 1)
    }
    assert bars == {
        "full, int4, 2,048 tokens: time of a step by that in bfloat16": (0.48, True),
        "full, int4, 2,048 tokens: time of a step by that of llama.cpp's Q4_0": (1.5, False),
        "delta, int4, 32,768 tokens, batch 1: tokens/s by llama.cpp's Q4_0": (2.5, True),
    }
    assert few_bits.targets(results, 2) == []
