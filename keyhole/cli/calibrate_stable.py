"""`keyhole calibrate --stable-layers`: the layers that say how much of a document SamKV keeps."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole.cli.common import flags, outputs, show
from keyhole.cli.common.outputs import Output
from keyhole.config import is_count, require, setting

if TYPE_CHECKING:
    from keyhole.reuse.blocks.stability import Stability

#: Contexts of the bundled model's tasks; evaluations count from 0, examinations from 1,000,000.
_FIRST_SEED = 2_000_000
_TASKS = ("recall", "multivalue", "vartrack", "majority")
_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class StableSettings:
    """What SamKV's stable layers are measured on."""

    num_stable_layers: int = setting(4, "layers to choose, those that score highest")
    num_documents: int = setting(32, "most documents to encode, evenly from all")
    block_size: int = setting(64, "tokens in a block; documents are cut to 32 blocks")

    def __post_init__(self) -> None:
        for name in ("num_stable_layers", "num_documents", "block_size"):
            require(is_count(getattr(self, name)), name, getattr(self, name), "at least 1")


def run(arguments: argparse.Namespace, settings: StableSettings, texts: list[Any] | None) -> int:
    """Measures, prints the score of each layer, and writes the file.

    texts: of --data; None: those of the bundled model.
    """
    output = _output(arguments)
    outputs.check(Output("--output", output, outputs.LAYERS))
    texts = _texts(settings.num_documents) if texts is None else texts
    model = flags.load_model(arguments)
    from keyhole.eval.stability import cut, measure

    documents = cut(model, texts, block_size=settings.block_size, most=settings.num_documents)
    found = measure(
        model,
        documents,
        block_size=settings.block_size,
        num_stable_layers=settings.num_stable_layers,
    )
    found.save(output)
    if arguments.json:
        print(show.to_json({**vars(found), "output": output}))
        return 0
    print(_text(found))
    print(f"written: {output}")
    return 0


def _text(found: Stability) -> str:
    rows = [
        [str(layer), str(score), "stable" if layer in found.stable_layers else ""]
        for layer, score in enumerate(found.scores)
    ]
    return (
        f"{found.model}: {show.count(found.num_documents, 'document')} in blocks of "
        f"{found.block_size}; a layer "
        "scores where\nthe most important block of a document is an outlier\n\n"
        f"{show.table(('layer', 'score', ''), rows, left=1)}\n"
    )


def _output(arguments: argparse.Namespace) -> str:
    from keyhole.reuse.blocks.stability import STABILITY_FILE

    if arguments.output is not None:
        return str(arguments.output)
    # Not into a cache of the hub, nor into the package.
    beside = Path(arguments.model) if arguments.model and Path(arguments.model).is_dir() else Path()
    return str(beside / STABILITY_FILE)


def _texts(number: int) -> list[str]:
    """Contexts of tasks, each a document."""
    from keyhole.eval.tiny_language.tasks import make

    return [
        make(_TASKS[n % len(_TASKS)], _LENGTH, _FIRST_SEED + n // len(_TASKS)).context
        for n in range(number)
    ]
