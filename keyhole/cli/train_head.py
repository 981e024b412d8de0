"""Trains a retrieval head, which selects what SpeContext reads, or the gate of SeerAttention-R, for
a model whose weights stay unchanged.

The head learns to attend to what the model attends to (objective attention), or is pruned from a
small draft model that learns the model's next tokens (eagle). A head made in one of these ways,
passed as --start, can be trained further so that the model's predictions under its selection match
those with full attention (selection). A gate learns, layer by layer, which blocks of tokens the
attention peaks in (gate). Ctrl-C writes a snapshot, and --resume continues from it to the same
final weights. Use the result with `--policy spe_context:head=FOLDER` or
`--policy seer_attention_r:gate=FOLDER`; a folder keyhole-head or seer-gate next to the weights is
used automatically.
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
    from keyhole.models.model import Model
    from keyhole.retrieval.training.train import TrainingOutcome
    from keyhole.retrieval.training.training_config import Corpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole train-head`."""
    flags.add_model(parser)
    flags.add_data(parser, "texts")
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="folder of the result; default: keyhole-head, or seer-gate for a gate, next to the "
        "weights, or here if --model is not a folder",
    )
    parser.add_argument("--resume", action="store_true", help="resume the run in the output folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_settings(parser, TrainingConfig, "training")


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns 130 if Ctrl-C ended it early."""
    given = flags.settings_of(arguments, TrainingConfig)
    config = TrainingConfig(**given)
    folder = _folder(arguments, config)
    check_output_folder("--output", folder)
    if arguments.data is None and not flags.has_bundled_vocabulary(arguments.model):
        raise ConfigError("give --data FILE with texts for this model")
    model = flags.load_model(arguments)
    from keyhole.retrieval.training import train

    if arguments.resume:
        # Settings that are not given keep their values from the first run.
        config = dataclasses.replace(train.config_of(folder) or config, **given)
    corpus = _corpus(arguments, model)
    with Interrupt(signal.SIGINT, signal.SIGTERM) as interrupt:
        outcome = train.train(
            model.network,
            corpus,
            config,
            folder,
            resume=arguments.resume,
            stop=lambda: interrupt.seen,
        )
    if arguments.json:
        print(terminal.to_json({"output": str(folder), **vars(outcome)}))
    elif outcome.finished:
        print(_text(outcome, config, folder))
    if outcome.finished:
        return 0
    print(
        f"stopped after {outcome.tokens:,} of {config.tokens:,} tokens; the same command with "
        f"--resume continues from {folder}",
        file=sys.stderr,
    )
    return INTERRUPTED


def _text(outcome: TrainingOutcome, config: TrainingConfig, folder: Path) -> str:
    done = terminal.count(outcome.tokens, "token"), terminal.count(outcome.steps, "step")
    lines = [f"{' in '.join(done)}, {outcome.seconds:.0f} s"]
    if outcome.loss is not None:
        what = "gate" if config.objective == "gate" else "head"
        lines.append(
            f"loss {outcome.loss:.3f}; with a budget of an eighth of the text, the {what} keeps "
            f"{outcome.recall:.1%} of the attention, the newest tokens {outcome.window:.1%}"
        )
    return "\n".join([*lines, f"written: {folder}"])


def _folder(arguments: argparse.Namespace, config: TrainingConfig) -> Path:
    if arguments.output is not None:
        return Path(arguments.output)
    # Never write into the hub's cache or the package.
    beside = Path(arguments.model) if arguments.model and Path(arguments.model).is_dir() else Path()
    return beside / ("seer-gate" if config.objective == "gate" else "keyhole-head")


def _corpus(arguments: argparse.Namespace, model: Model) -> Corpus:
    if arguments.data is None:
        from keyhole.eval.tiny_language.tasks import HeadTexts
        from keyhole.models.locate import TINY, TINY_HOPS, bundled_name

        return HeadTexts(hops=bundled_name(arguments.model or TINY) == TINY_HOPS)
    from keyhole.retrieval.training.training_config import read

    return read(arguments.data, model.tokenizer, model.vocab_size)
