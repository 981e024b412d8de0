"""Trains a retrieval head, which chooses what SpeContext reads, for a model that stays as it is.

The head learns to look where the model looks (objective attention), or is cut out of a small draft
model that learns the model's next tokens (eagle). Such a head, given as --start, can learn besides
to choose so that the model's predictions stay what they are with full attention (selection).
Ctrl-C writes a snapshot, and --resume goes on from it to the same weights. `--policy
spe_context:head=FOLDER` uses the result; in a folder keyhole-head beside the weights it is used by
itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from keyhole.cli.common import flags, terminal
from keyhole.cli.common.terminal import INTERRUPTED, Interrupt, check_output_folder
from keyhole.errors import ConfigError
from keyhole.retrieval.training.training_config import TrainingConfig

if TYPE_CHECKING:
    from keyhole.models.loading import Model
    from keyhole.retrieval.training.train import TrainingOutcome
    from keyhole.retrieval.training.training_config import Corpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole train-head`."""
    flags.add_model(parser)
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="texts: a JSON string or list of token ids per line of a .jsonl file, or the whole of "
        "any other file; without it texts of the bundled model's world",
    )
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="where the head goes; default: keyhole-head beside the weights, or here if --model is "
        "no folder",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in the folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_settings(parser, TrainingConfig, "training")


def run(arguments: argparse.Namespace) -> int:
    """Trains; 130 where Ctrl-C ended it early."""
    given = flags.settings_of(arguments, TrainingConfig)
    folder = _folder(arguments)
    check_output_folder("--output", folder)
    recipe = TrainingConfig(**given)
    if arguments.data is None and not flags.is_bundled(arguments.model):
        raise ConfigError("give --data FILE with texts for this model")
    model = flags.load_model(arguments)
    from keyhole.retrieval.training import train

    if arguments.resume:
        # What is not said again is as it was.
        recipe = dataclasses.replace(train.recipe_of(folder) or recipe, **given)
    corpus = _corpus(arguments, model)
    with Interrupt(signal.SIGINT, signal.SIGTERM) as interrupt:
        outcome = train.train(
            model.network,
            corpus,
            recipe,
            folder,
            resume=arguments.resume,
            stop=lambda: interrupt.seen,
        )
    if arguments.json:
        print(terminal.to_json({"output": str(folder), **vars(outcome)}))
    elif outcome.finished:
        print(_text(outcome, folder))
    if outcome.finished:
        return 0
    print(
        f"stopped after {outcome.tokens} of {recipe.tokens} tokens; the same command with --resume "
        f"goes on from {folder}",
        file=sys.stderr,
    )
    return INTERRUPTED


def _text(outcome: TrainingOutcome, folder: Path) -> str:
    lines = [f"{outcome.tokens} tokens in {outcome.steps} steps, {outcome.seconds:.0f} s"]
    if outcome.loss is not None:
        lines.append(
            f"loss {outcome.loss:.3f}; with an eighth of the text the head keeps "
            f"{outcome.recall:.1%} of the attention, the newest tokens {outcome.window:.1%}"
        )
    return "\n".join([*lines, f"written: {folder}"])


def _folder(arguments: argparse.Namespace) -> Path:
    if arguments.output is not None:
        return Path(arguments.output)
    # Not into a cache of the hub, nor into the package.
    beside = Path(arguments.model) if arguments.model and Path(arguments.model).is_dir() else Path()
    return beside / "keyhole-head"


def _corpus(arguments: argparse.Namespace, model: Model) -> Corpus:
    if arguments.data is None:
        from keyhole.eval.tiny_language.tasks import HeadTexts

        return HeadTexts()
    from keyhole.retrieval.training.training_config import read

    return read(arguments.data, model.tokenizer, model.vocab_size)
