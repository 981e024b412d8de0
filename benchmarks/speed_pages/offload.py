"""The section on offloaded layers in docs/results/speed.md, and its figure. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.offload.loading import ELASTIC, NO_ELASTIC, NO_OVERLAP
from benchmarks.results_page.text import written
from benchmarks.speed_pages import tables
from keyhole.drawing import FAINT, INK, picture

Line = dict[str, Any]

#: The figure of the bundled model, and the model; `picture_name` is that of any.
PICTURE, BUNDLED = "offload.png", "keyhole-tiny"
_MOVED = "policy;budget;repeated;hit rate;moved per step;without elastic;right words".split(";")
_TIMES = "policy;budget;elastic;without overlap;everything copied".split(";")
_COLORS = {"spe_context": "#b03a48", "delta": "#e08e4f"}
_MORE_COLORS = (INK, "#0b6e75", "#7a5ea8", "#4c8c4a")
#: "over 80% of the selected tokens overlap" (SpeContext, section 5.4 and figure 6b).
_PAPER = 0.8


def picture_name(line: Line) -> str:
    """The file of a line's figure."""
    return PICTURE if line["model"] == BUNDLED else f"offload-{line['model']}.png"


def section(line: Line) -> list[str]:
    """Paragraphs, the figure, a table of moved bytes and one of times."""
    below = {r["policy"]: r["offloaded_layers"] for r in line["results"] if r["system"] == ELASTIC}
    where = ", ".join(f"{count} layers under `{policy}`" for policy, count in below.items())
    name = line["model"]
    return [
        "## Offloaded layers" + ("" if name == BUNDLED else f" of `{name}`"),
        f"![Share of a selection that repeats, against budget](../images/{picture_name(line)})",
        f"`{name}` works through long derivations, with every layer that can be offloaded\n"
        f"offloaded from the first token on: {where}. *Repeated*: the share of a step's selection\n"
        "that the previous step also had, in tokens (pages under `delta`). *Hit rate*: the share\n"
        "of selected tokens that were in the buffers, without the newest one. The last column is\n"
        "how often the right next word was the most likely one, with or without offloading:",
        written(
            _MOVED,
            _rows(line, _moved),
        ),
        # One model's times are enough.
        *(_timed(line) if name == BUNDLED else []),
        *_large(line),
        _about(line),
    ]


def _timed(line: Line) -> list[str]:
    """The table of times."""
    return [
        "Time of a step, relative to no offloading, and in brackets the milliseconds that\n"
        "attention waited for copies. Layers are offloaded to a file here; if the system caches\n"
        "it, these are copies within memory.",
        written(_TIMES, _rows(line, _times)),
    ]


def curve(line: Line, path: Path) -> None:
    """Writes a PNG of repeat rate and moved share against budget; its description is the date."""
    policies = list(dict.fromkeys(result["policy"] for result in line["results"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    with picture(path, date=line["date"], figsize=(7.2, 3.2), layout="constrained") as figure:
        axes = figure.subplots(1, 2, sharex=True)
        for place, policy in enumerate(policies):
            points = [p for p in _pairs(line) if p[ELASTIC]["policy"] == policy]
            budgets = [p[ELASTIC]["budget"] for p in points]
            color = _COLORS.get(policy) or _MORE_COLORS[place % len(_MORE_COLORS)]
            look = {"color": color, "marker": "o", "markersize": 4, "linewidth": 1.6}
            repeated = [100 * p[ELASTIC]["repeat_rate"] for p in points]
            moved = [100 * _share(p) for p in points]
            axes[0].plot(budgets, repeated, label=policy, **look)
            axes[1].plot(budgets, moved, label=policy, **look)
        axes[0].axhline(100 * _PAPER, color=FAINT, linestyle=(0, (4, 2)), linewidth=1)
        axes[0].annotate(
            "the paper: over 80 %", (0, 100 * _PAPER), (4, 3), color=FAINT, fontsize=8,
            xycoords=("axes fraction", "data"), textcoords="offset points",
        )  # fmt: skip
        axes[0].set_title("selected again in the next step, %")
        axes[1].set_title("bytes moved, % of what copying everything takes")
        for axis in axes:
            axis.set_xscale("log", base=2)
            budgets = sorted({result["budget"] for result in line["results"]})
            axis.set_xticks(budgets, [f"{n:,}" for n in budgets])
            axis.minorticks_off()
            axis.set_ylim(0, 100)
            axis.grid(axis="y")
            axis.set_axisbelow(True)
            axis.set_xlabel("token budget")
        axes[1].legend(frameon=False)


def _large(line: Line) -> list[str]:
    """The table of the large model; empty for a line without it."""
    if not line.get("large"):
        return []
    settings, first = line["settings"], line["large"][0]
    return [
        f"The same with the shape of {settings['shape']}, random weights in bfloat16, over "
        f"{settings['context']:,} tokens,\nbudget {first['budget']:,}, medians of "
        f"{first['steps_timed']} steps. With random keys and a random head, selections\n"
        "have almost nothing in common from step to step, so this is the worst case for loading:",
        written(
            ["policy", "system", "step", "/ resident", "waiting", "moved per step", "hit rate"],
            [_large_cells(result) for result in line["large"]],
        ),
    ]


def _large_cells(result: dict[str, Any]) -> list[str]:
    names = [f"`{result['policy']}`", result["system"].replace("_", " ")]
    cells = [f"{result['step_ms']:.0f} ms", f"{result['ratio_to_resident']:.2f}"]
    if result["moved_bytes"] is None:
        return [*names, *cells, "", "", ""]
    return [
        *names,
        *cells,
        f"{result['stall_ms']:.1f} ms",
        f"{result['moved_bytes'] / 2**20:.1f} MiB",
        f"{result['hit_rate']:.1%}",
    ]


def _pairs(line: Line) -> list[dict[str, dict[str, Any]]]:
    """The results of all systems, by policy and budget."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for result in line["results"]:
        found.setdefault((result["policy"], result["budget"]), {})[result["system"]] = result
    return list(found.values())


def _rows(line: Line, cells: Callable[[dict[str, dict[str, Any]]], list[str]]) -> list[list[str]]:
    return [
        [f"`{found[ELASTIC]['policy']}`", f"{found[ELASTIC]['budget']:,}", *cells(found)]
        for found in _pairs(line)
    ]


def _moved(found: dict[str, dict[str, Any]]) -> list[str]:
    elastic, everything = found[ELASTIC], found[NO_ELASTIC]
    return [
        f"{elastic['repeat_rate']:.1%}",
        f"{elastic['hit_rate']:.1%}",
        f"{elastic['moved_bytes'] / 1024:.0f} KiB ({_share(found):.0%})",
        f"{everything['moved_bytes'] / 1024:.0f} KiB",
        f"{elastic['right_share']:.1%}",
    ]


def _times(found: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{found[name]['ratio_to_resident']:.2f} ({found[name]['stall_ms']:.2f})"
        for name in (ELASTIC, NO_OVERLAP, NO_ELASTIC)
    ]


def _share(found: dict[str, dict[str, Any]]) -> float:
    return float(found[ELASTIC]["moved_bytes"] / found[NO_ELASTIC]["moved_bytes"])


def _about(line: Line) -> str:
    settings, first = line["settings"], line["results"][0]
    medians = f"; times are medians of {first['steps_timed']} interleaved steps"
    texts = f"{settings['items']} derivation{'' if settings['items'] == 1 else 's'}"
    return (
        f"{line['model']}, {texts} of up to {max(line['tokens']):,} "
        f"tokens, {first['steps_counted']:,} steps counted at the least budget"
        f"{medians if line['model'] == BUNDLED else ''}. {tables.origin(line)}"
    )
