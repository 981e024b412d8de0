"""Compares the engine with transformers' eager attention on a model, before you rely on it.

Exit status 1 if any check fails. With --weights, the checks are for the packed model, and it is
compared with the model as stored: perplexity and logits. If a retrieval head is stored with the
weights, the command also reports how much of the model's attention the head finds at several
lengths.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from keyhole.cli.common import flags, terminal
from keyhole.errors import ConfigError
from keyhole.models.weights.weight_format import weight_format

if TYPE_CHECKING:
    from keyhole.eval.verify import RecallCell, RecallText
    from keyhole.eval.weight_error import PlainRun, WeightError
    from keyhole.models.model import Model
    from keyhole.retrieval.head import RetrievalHead
    from keyhole.retrieval.training.training_config import Corpus

    Texts = Mapping[int, list[RecallText]]

_HEADS = ("policy", "run", "result", "error", "allowed", "largest difference", "same token")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole verify`."""
    flags.add_model(parser)
    parser.add_argument(
        "--length",
        metavar="N",
        help="also check a prompt of this many tokens, for example beyond a sliding window or "
        "where RoPE is scaled; eager attention needs memory quadratic in N",
    )
    flags.add_data(parser, "texts for the recall of the retrieval head and for --weights")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints one line per check."""
    length = _length(arguments.length)
    plain = _plain(arguments)
    model = flags.load_model(arguments)
    texts = _texts(model, arguments)
    from keyhole import kernels
    from keyhole.eval.verify import verify
    from keyhole.eval.weight_error import weight_error

    checks = verify(model, length=length)
    passed = all(check.passed for check in checks)
    about = {
        "model": model.name,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": kernels.backend(model.device),
        "decode steps": "replayed as CUDA graphs"
        if any(check.replayed for check in checks)
        else "launched one by one",
    }
    packing = None if plain is None else weight_error(plain, model)
    head = _head(model, texts)
    if arguments.json:
        found = [vars(check) | {"passed": check.passed} for check in checks]
        cells = None if head is None else [vars(cell) | {"recall": cell.recall} for cell in head[1]]
        error = None if packing is None else vars(packing) | {"change": packing.change}
        facts = {"passed": passed, "checks": found, "head_recall": cells, "weight_error": error}
        print(terminal.to_json({**about, **facts}))
        return 0 if passed else 1
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    rows = [
        [
            check.policy,
            check.run,
            "exact" if check.passed else "DIFFERS",
            f"{check.error:.1e}",
            f"{check.tolerance:.1e}",
            f"{check.difference:.1e}",
            f"{check.same_tokens:.1%}",
        ]
        for check in checks
    ]
    print(terminal.table(_HEADS, rows, left=3))
    failed = sum(not check.passed for check in checks)
    print(f"{failed} of {len(checks)} checks failed" if failed else "all checks passed")
    if packing is not None:
        print(_packing_text(model, packing))
    _print_head(model, head)
    return 0 if passed else 1


def _plain(arguments: argparse.Namespace) -> PlainRun | None:
    """With --weights, texts and the logits of the model as stored, whose memory is then freed."""
    if arguments.weights is None:
        return None
    stored = argparse.Namespace(**{**vars(arguments), "weights": None})
    weight_format(arguments.weights)  # refused before the model is loaded
    model = flags.load_model(stored)
    arguments.model_files = stored.model_files
    from keyhole.eval.weight_error import plain_run

    return plain_run(model, _corpus(model, arguments))


def _corpus(model: Model, arguments: argparse.Namespace) -> Corpus | None:
    """The texts of --data, or those of the bundled model; None: neither."""
    from keyhole.eval.tiny_language.tasks import HeadTexts
    from keyhole.retrieval.training.training_config import read

    if arguments.data is not None:
        return read(arguments.data, model.tokenizer, model.vocab_size)
    return HeadTexts() if flags.has_bundled_vocabulary(arguments.model) else None


def _packing_text(model: Model, found: WeightError) -> str:
    return (
        f"\nweights {model.weights} compared with those as stored, {found.tokens:,} tokens of "
        f"{found.source}:\nperplexity {found.perplexity:.3f}, as stored "
        f"{found.plain_perplexity:.3f} ({found.change:+.2%}); logit error {found.logit_error:.1%}; "
        f"divergence {found.divergence:.4f} nats; same token {found.same_tokens:.1%}"
    )


def _length(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"--length {text!r} must be a whole number of tokens")
    return int(text)


def _texts(model: Model, arguments: argparse.Namespace) -> Texts | None:
    """The texts for the recall of the head; None without a head, or without texts for it.

    ConfigError, before the checks, for texts that are too short or that nothing would read.
    """
    from keyhole.eval.verify import recall_texts

    if model.head is None:
        if arguments.data is not None and arguments.weights is None:
            raise ConfigError(
                f"--data {arguments.data!r} would not be used, because {model.name!r} has no "
                "retrieval head; leave it out, or give --weights"
            )
        return None
    corpus = _corpus(model, arguments)
    return None if corpus is None else recall_texts(model, corpus)


def _head(model: Model, texts: Texts | None) -> tuple[RetrievalHead, list[RecallCell]] | None:
    """The head and its recall over the texts."""
    from keyhole.eval.verify import check_head

    return None if texts is None else check_head(model, texts)


def _print_head(model: Model, head: tuple[RetrievalHead, list[RecallCell]] | None) -> None:
    from keyhole.eval.verify import RECALL_BUDGETS, recall_rows

    if head is None:
        if model.head is not None:
            print("give --data FILE to measure how much attention the retrieval head finds")
        return
    heads = ["tokens", *(f"budget {budget}" for budget in RECALL_BUDGETS)]
    print(
        "\nattention found by the retrieval head (in parentheses: by a window of the same budget):"
    )
    print(terminal.table(heads, recall_rows(head[1]), left=0))
    trained = head[0].config.trained_length
    if trained < model.max_length:
        print(
            f"warning: the head was trained at {trained:,} tokens, the model takes "
            f"{model.max_length:,}; heads select worse beyond their trained length"
        )


def _add_models_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole models`."""
    parser.add_argument(
        "family",
        nargs="*",
        metavar="FAMILY",
        help="model_type of a config, such as qwen3; default: all that generate text",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per family")


def _run_models(arguments: argparse.Namespace) -> int:
    """Measures each family with a small random model; about a second each."""
    from tqdm.auto import tqdm

    from keyhole.cli.common.flags import quiet
    from keyhole.exactness_gate import (
        families_of_transformers,
        measure_family,
        require_family,
    )

    quiet()
    for name in arguments.family:
        require_family(name)  # before the work on others
    names = arguments.family or families_of_transformers()
    exact = 0
    for name in tqdm(names, unit="family", leave=False, disable=None):
        verdict = measure_family(name)
        exact += verdict.exact
        if arguments.json:
            print(terminal.to_json({**vars(verdict), "exact": verdict.exact}), flush=True)
        else:
            print(f"{name:24} {verdict.reason or 'exact'}", flush=True)
    if not arguments.json:
        print(f"{exact} of {len(names)} families are exact")
    return 0


class Models:
    """Lists the families of the installed transformers, and which of them the engine runs exactly.

    Each family is measured with a small random model, which takes about a second.
    """

    add_arguments = staticmethod(_add_models_arguments)
    run = staticmethod(_run_models)
