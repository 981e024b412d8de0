"""Measures which layers of a model should select for DELTA, and how much the other layers lose.

The model continues the prompts with full attention. All placements are evaluated on the same run,
and the table compares them: the attention mass that a sparse layer keeps, the relative error of its
output, the layers that read everything, and the share of keys read. The output file is for
`--policy delta:layers=FILE`; if it is named keyhole-delta.json and stored with the weights, it is
used automatically.

With --stable-layers the command measures for SamKV which layers should decide how much of a stored
document is kept: those in which the most important block of a document stands out. Its output file,
keyhole-samkv.json, is used automatically if it is stored with the weights; otherwise pass it as
`--reuse sam_kv:layers=FILE`.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole import drawing
from keyhole.cli.common import flags, terminal
from keyhole.cli.common.terminal import LAYERS, PICTURE, Output, check_outputs
from keyhole.config import (
    EngineConfig,
    require_counts,
    require_known,
    require_layers_of,
    setting,
)
from keyhole.errors import ConfigError, RequestError, UnknownNameError
from keyhole.policies.delta import Delta
from keyhole.policies.selection_layers import rank_by_shift
from keyhole.retrieval.training.training_config import FORMS, texts_in

if TYPE_CHECKING:
    from keyhole.eval.calibrate import Measurement
    from keyhole.policies.selection_layers import Calibration
    from keyhole.reuse.sam_kv import Stability


_METHODS = ("optimal", "paper")
_MEASURES = ("mass", "error")
_DELTA = ("token_budget", "recent_pages", "full_layers")
_FULL_LAYERS = (0, 1)
#: First seed of the bundled model's items: evaluations use seeds from 0, examinations from
#: 1,000,000.
_FIRST_SEED = 2_000_000
_TASKS = (("recall", 2048), ("derive", 1024))
_NUM_ITEMS = 3


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """How DELTA's layers are placed."""

    method: str = setting(
        "optimal", "optimal: least loss by --measure; paper: largest shifts between layers"
    )
    measure: str | None = setting(
        None,
        "the loss that optimal minimises: mass (attention mass that is missed) or error (relative "
        "error of the attention output); None: mass",
    )
    num_delta_layers: int = setting(3, "number of layers that select pages")
    max_tokens: int = setting(256, "tokens to generate per prompt")
    plot: str | None = setting(None, "write a picture of the measured recall to this file")

    def __post_init__(self) -> None:
        require_known("method", self.method, _METHODS)
        if self.measure not in (None, *_MEASURES):
            raise UnknownNameError("measure", str(self.measure), _MEASURES)
        if self.method == "paper" and self.measure is not None:
            raise ConfigError(
                f"--measure {self.measure} needs --method optimal; paper uses the shift between "
                "layers"
            )
        require_counts(self, "num_delta_layers", "max_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole calibrate`."""
    flags.add_model(parser)
    parser.add_argument(
        "--stable-layers", action="store_true", help="measure SamKV's layers instead of DELTA's"
    )
    flags.add_data(parser, "prompts, or documents")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write the layers to this JSON file; default: none; with --stable-layers "
        "keyhole-samkv.json in the folder of the weights, or here if --model is not a folder",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_settings(parser, PlacementSettings, "placement of DELTA's layers")
    flags.add_settings(parser, Delta, "settings of DELTA", _DELTA)
    flags.add_settings(parser, StableSettings, "stable layers of SamKV")


def run(arguments: argparse.Namespace) -> int:
    """Measures, places, and prints what each layer and each placement costs."""
    _check_own(arguments)
    if arguments.stable_layers:
        stable = StableSettings(**flags.settings_of(arguments, StableSettings))
        texts = _given(arguments)
        return run_stable(arguments, stable, texts)
    placement: Any = PlacementSettings(**flags.settings_of(arguments, PlacementSettings))
    settings = flags.settings_of(arguments, Delta)
    check_outputs(
        Output("--output", arguments.output, LAYERS),
        Output("--plot", placement.plot, PICTURE),
    )
    if placement.plot is not None:
        drawing.matplotlib()
    full_layers = settings.pop("full_layers", _FULL_LAYERS)
    prompts = _given(arguments) or _prompts()
    model = flags.load_model(arguments)
    from keyhole.eval.calibrate import candidates_of, measured
    from keyhole.eval.report import layer_charts

    wanted = (placement.num_delta_layers, full_layers)
    geometry = model.geometry(EngineConfig.page_size)
    require_layers_of("full_layers", full_layers, geometry.num_layers)
    candidates_of(geometry.full_attention, *wanted)  # refused before the work
    try:
        found = measured(model, prompts, max_tokens=placement.max_tokens, **settings)
    except RequestError as error:
        raise ConfigError(f"--data {arguments.data!r}: {error}") from error
    placed = found.place(placement.method, *wanted, placement.measure or "mass")
    if arguments.json:
        others = [
            {"placement": name, "delta_layers": one.delta_layers, **found.cost(one)._asdict()}
            for name, one in _others(found, *wanted)
        ]
        extra = {"steps": found.steps, "shift": found.shift, "placements": others}
        print(terminal.to_json({**vars(placed), **extra}))
    else:
        print(_text(placed, found, _others(found, *wanted)))
    # After the results, which a disk without room must not cost.
    if arguments.output:
        placed.save(arguments.output)
    if placement.plot:
        layer_charts.recall_chart(found, placed, placement.plot)
    if not arguments.json:
        for path in filter(None, (arguments.output, placement.plot)):
            print(f"written: {path}")
    return 0


def _others(
    found: Measurement, count: int, full_layers: Sequence[int]
) -> list[tuple[str, Calibration]]:
    """Other placements of the same number of layers, by name, for comparison."""
    candidates = [layer for layer in found.layers if layer not in full_layers]
    alone = rank_by_shift(found.shift, candidates, count)
    return [
        ("optimal, mass", found.place("optimal", count, full_layers, "mass")),
        ("optimal, error", found.place("optimal", count, full_layers, "error")),
        ("paper", found.place("paper", count, full_layers)),
        (_ALONE, found.expected(full_layers, alone, "paper", "shift")),
    ]


def _check_own(arguments: argparse.Namespace) -> None:
    """Refuses flags that belong to the other measurement."""
    delta = [*(field.name for field in dataclasses.fields(PlacementSettings)), *_DELTA]
    stable = [field.name for field in dataclasses.fields(StableSettings)]
    wrong = [
        name
        for name in (delta if arguments.stable_layers else stable)
        if getattr(arguments, name) is not None
    ]
    if wrong:
        flag = flags.flag_of(wrong[0])
        how = (
            "cannot be combined with --stable-layers"
            if arguments.stable_layers
            else "needs --stable-layers"
        )
        raise ConfigError(f"{flag} {how}")


_READS = {
    "window": "its own window",
    "full": "everything",
    "selects": "everything, and selects",
    "sparse": "the selection of layer {}",
}


#: The paper's ranking alone, without the first candidate; not a choice of this command.
_ALONE = "largest shifts alone"


def _text(
    placed: Calibration, found: Measurement, others: Sequence[tuple[str, Calibration]]
) -> str:
    roles = found.roles(placed.full_layers, placed.delta_layers)
    rows = [
        [
            str(layer),
            _READS[role.kind].format(role.chooser),
            f"{placed.recall[layer]:.1%}",
            f"{placed.error[layer]:.1%}",
            f"{found.shift[layer]:.3f}",
        ]
        for layer, role in enumerate(roles)
    ]
    by = f" by {placed.measure}" if placed.method == "optimal" else ""
    heads = ("layer", "reads", "attention kept", "output error", "shift")
    return (
        f"{placed.model}: {placed.method} placement{by} over {found.steps} decode steps, "
        f"token_budget {placed.token_budget}\n\n"
        f"{terminal.table(heads, rows, left=2)}\n\n"
        f"{_costs(found, others)}\n"
    )


def _costs(found: Measurement, others: Sequence[tuple[str, Calibration]]) -> str:
    """The cost of each placement: means over its sparse layers."""
    rows = []
    for name, one in others:
        cost = found.cost(one)
        rows.append(
            [
                name,
                terminal.setting(one.delta_layers),
                terminal.setting(cost.dense_layers),
                f"{cost.recall:.1%}",
                f"{cost.error:.1%}",
                f"{cost.keys_read:.1%}",
            ]
        )
    heads = ("placement", "choose", "read all", "attention kept", "output error", "keys read")
    text = terminal.table(heads, rows, left=3)
    paper, alone = dict(others)["paper"], dict(others)[_ALONE]
    first = paper.delta_layers[0]
    if first in alone.delta_layers:
        return text
    return (
        f"{text}\n\n"
        f"By the largest shifts alone no layer before {alone.delta_layers[0]} would be sparse. "
        f"paper chooses in layer {first} first,\n"
        "the first one that is not in full_layers, as the authors do."
    )


def _given(arguments: argparse.Namespace) -> list[Any] | None:
    """The texts of --data; None: use the bundled model's texts."""
    if arguments.data is None:
        if not flags.has_bundled_vocabulary(arguments.model):
            what = "documents" if arguments.stable_layers else "prompts"
            raise ConfigError(f"give --data FILE with {what} for this model")
        return None
    found = [text for _, text in texts_in(arguments.data)]
    if not found:
        raise ConfigError(f"--data {arguments.data!r} has no text; give {FORMS}")
    return found


def _prompts() -> list[Any]:
    from keyhole.eval.tiny_language.tasks import make

    return [
        make(task, length, _FIRST_SEED + n).prompt
        for n in range(_NUM_ITEMS)
        for task, length in _TASKS
    ]


#: The same for contexts of its tasks.
_STABLE_SEED = 2_000_000
_STABLE_TASKS = ("recall", "multivalue", "vartrack", "majority")
_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class StableSettings:
    """What SamKV's stable layers are measured on."""

    num_stable_layers: int = setting(4, "layers to choose: those with the highest scores")
    num_documents: int = setting(32, "maximum number of documents to encode, taken evenly from all")
    block_size: int = setting(64, "tokens per block; documents are cut to 32 blocks")

    def __post_init__(self) -> None:
        require_counts(self, "num_stable_layers", "num_documents", "block_size")


def run_stable(
    arguments: argparse.Namespace, settings: StableSettings, texts: list[Any] | None
) -> int:
    """Measures, prints the score of each layer, and writes the file.

    texts: of --data; None: those of the bundled model.
    """
    output = _output(arguments)
    check_outputs(Output("--output", output, LAYERS))
    texts = _texts(settings.num_documents) if texts is None else texts
    model = flags.load_model(arguments)
    from keyhole.eval.calibrate import cut, measure

    documents = cut(model, texts, block_size=settings.block_size, most=settings.num_documents)
    found = measure(
        model,
        documents,
        block_size=settings.block_size,
        num_stable_layers=settings.num_stable_layers,
    )
    if arguments.json:
        print(terminal.to_json({**vars(found), "output": output}))
    else:
        print(_stable_text(found))
    found.save(output)  # after the results, which a disk without room must not cost
    if not arguments.json:
        print(f"written: {output}")
    return 0


def _stable_text(found: Stability) -> str:
    rows = [
        [str(layer), str(score), "stable" if layer in found.stable_layers else ""]
        for layer, score in enumerate(found.scores)
    ]
    return (
        f"{found.model}: {terminal.count(found.num_documents, 'document')} in blocks of "
        f"{found.block_size}; a layer scores where\n"
        "the most important block of a document is an outlier\n\n"
        f"{terminal.table(('layer', 'score', ''), rows, left=1)}\n"
    )


def _output(arguments: argparse.Namespace) -> str:
    from keyhole.reuse.sam_kv import STABILITY_FILE

    if arguments.output is not None:
        return str(arguments.output)
    # Never write into the hub's cache or the package.
    beside = Path(arguments.model) if arguments.model and Path(arguments.model).is_dir() else Path()
    return str(beside / STABILITY_FILE)


def _texts(number: int) -> list[str]:
    """Contexts of tasks, each a document."""
    from keyhole.eval.tiny_language.tasks import make

    return [
        make(
            _STABLE_TASKS[n % len(_STABLE_TASKS)], _LENGTH, _STABLE_SEED + n // len(_STABLE_TASKS)
        ).context
        for n in range(number)
    ]
