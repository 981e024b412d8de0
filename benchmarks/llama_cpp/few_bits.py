"""Decode steps with quantised weights: Keyhole in bfloat16, int8 and int4, llama.cpp in Q4_0.

`python -m benchmarks.llama_cpp.few_bits --contexts 2048 --batch 1`. All systems take turns in one
run. The weights are the same random numbers, packed by each program itself, so logits are not
compared here; tests compare them with those of the unpacked weights. All of Keyhole's engines share
one cache.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks import command
from benchmarks.command import target
from benchmarks.llama_cpp.file import LlamaFile
from benchmarks.llama_cpp.system import SYSTEMS, Llama
from keyhole.bench.decode import WARM_UP
from keyhole.bench.measure import Report, Result, Turn, median_ratio, take_turns
from keyhole.bench.model import RandomKV, Weights, make_weights, prompts, without_copying_weights
from keyhole.bench.settings import PAGE_SIZE, DecodeSettings
from keyhole.bench.systems import KeyholeSystem, Pages
from keyhole.models.fast_layers import speed_up
from keyhole.models.model import Model
from keyhole.models.modules.fused_layer import fuse_layers
from keyhole.models.weights.packing import pack_weights
from keyhole.models.weights.weight_format import weight_format
from keyhole.retrieval.head import RetrievalHead

_MODULE = "benchmarks.llama_cpp.few_bits"
_PLAIN = "bfloat16"
#: Engines besides full attention in bfloat16: a policy and a format of weights.
_ENGINES = (("full", "int8"), ("full", "int4"), ("delta", "int4"), ("spe_context", "int4"))
#: Targets at 2,048 tokens and batch 1, and at 32,768 tokens by batch.
_SHORT, _LONG, _FASTER = 2048, 32768, {1: 2.0, 8: 3.0}
_TABLE = (
    (
        ("tokens", "context", "{:,}".format),
        ("system", "system", str),
        ("step ms", "step_ms", "{:.1f}".format),
        ("of bfloat16", "ratio", "{:.2f}".format),
        ("weights GiB", "weight_gib", "{:.2f}".format),
    ),
    2,
)


def run(settings: DecodeSettings, report: Report) -> dict[str, Any]:
    """The part of a line of results that is specific to this benchmark."""
    weights = make_weights(settings)
    models = {_PLAIN: weights.keyhole}
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        names = [name for name in SYSTEMS if name in settings.systems]
        file = stack.enter_context(LlamaFile()) if names else None
        if file is not None:
            file.write(weights)
            file.quantise()
        for form in ("int8", "int4"):
            models[form] = packed_model(weights, form)
        for context in settings.contexts:
            found: list[Result] = []
            for name in names or (None,):
                found += _together(models, settings, context, name, file)
            results += found
            report(found, [])
    bars = targets(results, settings.batch)
    about = {} if file is None else {"llama_cpp": file.about}
    return {"settings": asdict(settings), "results": results, "bars": bars} | about


def packed_model(weights: Weights, form: str) -> Model:
    """A copy of the model with packed weights, in a format such as `int4`."""
    wanted, network = weight_format(form), without_copying_weights(weights.transformers)
    assert wanted is not None
    pack_weights(network, wanted, weights.keyhole.name)
    speed_up(network, weights.keyhole.device)
    fuse_layers(network, weights.keyhole.device)
    return replace(weights.keyhole, network=network, weights=form)


def _together(
    models: dict[str, Model],
    settings: DecodeSettings,
    context: int,
    name: str | None,
    file: LlamaFile | None,
) -> list[Result]:
    """Keyhole's engines and one system of llama.cpp, taking turns."""
    model, batch = models[_PLAIN], settings.batch
    steps = WARM_UP + settings.repeat + 1
    chosen = [one for one in _ENGINES if one[0] in settings.systems]
    engines = [("full", _PLAIN), *chosen]
    numbers = RandomKV(model, batch, context)
    texts, _ = prompts(model, batch, context, 1)
    with contextlib.ExitStack() as stack:
        turns, sizes = {}, {}
        if name is not None:
            assert file is not None
            other = Llama(name, model, file, batch, context, steps)
            stack.callback(other.close)
            other.fill(numbers)
            other.start(texts, steps)
            label = f"{name}, Q4_0"
            sizes[label] = file.num_bytes
            turns[label] = Turn(
                call=other.step,
                before=other.settle,
                after=other.rest,
                told_ms=lambda: other.step_ms,
            )
        pages = Pages(model, [policy for policy, _ in engines], batch, context, steps)
        head = RetrievalHead.random(model.network) if pages.cache.common else None
        pages.systems = [
            KeyholeSystem(policy, models[form], pages.cache, batch, head)
            for policy, form in engines
        ]
        with numbers.filling(1):
            pages.fill(numbers)
        pages.know(texts)
        for (policy, form), system in zip(engines, pages.systems, strict=True):
            system.start(texts, WARM_UP + settings.repeat)
            turns[f"{policy}, {form}"] = Turn(call=system.step)
            stored = models[form].network.state_dict().values()
            sizes[f"{policy}, {form}"] = sum({x.data_ptr(): x.nbytes for x in stored}.values())
        times = take_turns(turns, WARM_UP + settings.repeat, model.device)
    plain = times[f"full, {_PLAIN}"][WARM_UP:]
    return [
        {
            "context": context,
            "batch": batch,
            "page_size": PAGE_SIZE,
            "system": label,
            "beside": name,
            "step_ms": statistics.median(spent[WARM_UP:]),
            "ratio": median_ratio(spent[WARM_UP:], plain),
            "all_step_ms": spent[WARM_UP:],
            "weight_gib": sizes[label] / 2**30,
        }
        for label, spent in times.items()
    ]


def targets(results: Sequence[Result], batch: int) -> list[dict[str, Any]]:
    """The targets whose systems were measured, beside the faster setting of llama.cpp."""
    together: dict[int, dict[str | None, dict[str, float]]] = {}
    for result in results:
        beside = together.setdefault(result["context"], {}).setdefault(result["beside"], {})
        beside[result["system"]] = result["ratio"]
    found = []
    for context, system, ratio, peer in _beside_the_faster(together):
        if (context, batch, system) == (_SHORT, 1, "full, int4"):
            about = f"{system}, {context:,} tokens: time of a step by that in bfloat16"
            found.append(target(about, ratio, 0.5, "<="))
            if peer is not None:
                about = f"{system}, {context:,} tokens: time of a step by that of llama.cpp's Q4_0"
                found.append(target(about, ratio / peer, 1.15, "<="))
        sparse = system in ("delta, int4", "spe_context, int4")
        if context == _LONG and sparse and batch in _FASTER and peer is not None:
            about = f"{system}, {context:,} tokens, batch {batch}: tokens/s by llama.cpp's Q4_0"
            found.append(target(about, peer / ratio, _FASTER[batch]))
    return found


def _beside_the_faster(
    together: Mapping[int, Mapping[str | None, Mapping[str, float]]],
) -> Iterator[tuple[int, str, float, float | None]]:
    """Context, engine, ratio, and that of llama.cpp, all of systems that took turns.

    together: ratios by context, by the setting of llama.cpp beside, and by system.
    """
    for context, groups in together.items():
        peers = {beside: ratios.get(f"{beside}, Q4_0") for beside, ratios in groups.items()}
        beside = min(peers, key=lambda one: peers[one] or float("inf"))
        for system, ratio in groups[beside].items():
            if not system.startswith(str(beside)):
                yield context, system, ratio, peers[beside]


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns its exit status."""
    return command.main(
        _MODULE, DecodeSettings, run, argv, about=__doc__, name="few-bits", table=_TABLE
    )


if __name__ == "__main__":
    sys.exit(main())
