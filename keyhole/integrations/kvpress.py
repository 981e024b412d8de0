"""Runs evaluation tasks under the presses (KV cache compressors) of kvpress; see docs/kvpress.md.

Names may have settings: `--presses snapkv:window_size=32,tova --tasks passkey:depth=0.5`. For the
bundled model, a task in plain English is replaced by its form in that model's vocabulary. Every
cell (task, length, setup, press, budget) adds a line to --output; a cell that is stored with at
least as many samples is not measured again. Exit status 1 if a cell was refused.

Samples, their tokens and the fields of a line are the same as in `keyhole eval`, so one file can
hold lines of both. In setup `prompt` a press sees the question; in setup `question` it sees only
the context, which is how kvpress itself is used. The question is computed in one forward pass, so
only the answer has decode steps.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import itertools
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from kvpress.presses.base_press import SUPPORTED_MODELS
from torch import Tensor
from transformers import DynamicCache

from keyhole import registry
from keyhole.bench import measure
from keyhole.cache.argument import cache_argument, cache_name
from keyhole.config import require_counts, require_known
from keyhole.errors import ConfigError, KeyholeError, ModelError, NumericalError
from keyhole.eval.line_file import LineFile
from keyhole.eval.run import as_stored, model_digest, require_length
from keyhole.eval.settings import SETUPS
from keyhole.eval.tasks import Task, answered, parse
from keyhole.eval.workload import Answered
from keyhole.integrations.presses import Press, make_press, presses
from keyhole.models import families
from keyhole.models.loading import load
from keyhole.models.locate import TINY, is_tiny
from keyhole.models.model import Model, decoder_layers
from keyhole.registry import Spec

# Positions are passed to every forward pass: the cache of a compressed prompt is shorter than the
# prompt, so transformers would derive wrong positions from its length. They are also passed as
# `cache_position`, by which kvpress recognises a prefill; transformers 5.3 and later ignore this
# argument but pass it on, and every press fails without it.


@dataclass(kw_only=True)
class PressAnswer:
    """Generated tokens, including the one that ended them, and the cost of the decode steps.

    One entry per step: share of keys read (mean over layers), bytes of keys and values read,
    milliseconds. peak_bytes: the largest size of the cache.
    """

    tokens: list[int] = field(default_factory=list)
    read_shares: list[float] = field(default_factory=list)
    bytes_read: list[int] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0


class CompressedModel:
    """A model with the attention functions of transformers; it cannot be used by an engine.

    ModelError for a model that kvpress does not support, or whose layers drop tokens themselves.
    """

    def __init__(self, model: Model) -> None:
        network = model.network
        if not isinstance(network, SUPPORTED_MODELS):
            known = ", ".join(cls.__name__ for cls in SUPPORTED_MODELS)
            raise ModelError(
                f"kvpress does not support {model.name!r}, a {type(network).__name__} "
                f"(supported: {known})"
            )
        if not all(layout.reads_all for layout in families.layouts(network.config)):
            raise ModelError(
                f"{model.name!r} has layers with a sliding window or an indexer, which already "
                "drop tokens, so a budget would not mean the same in all layers"
            )
        if model.is_hybrid:
            raise ModelError(
                f"{model.name!r} has layers with a recurrent state, which no press can reduce"
            )
        self._model = model
        self._attend_by("sdpa")

    @torch.no_grad()
    def answer(
        self, press: Press, context: Sequence[int], question: Sequence[int], max_tokens: int
    ) -> PressAnswer:
        """Greedy decoding of at most `max_tokens`.

        context: token ids that are computed densely, then compressed. question: token ids that are
        computed over the remaining tokens; without a question, the first token is still exact.
        ConfigError if the budget is too small for the question; NumericalError for NaN.
        """
        self._attend_by(press.attention)
        network, cache, answer = self._model.network, _CountingCache(), PressAnswer()
        with _applied(press.prefill(len(context), len(question)), network):
            logits = self._forward(context, 0, cache)
        if question:
            logits = self._forward(question, len(context), cache)
        position = len(context) + len(question)
        with _applied(press.decoding(), network):
            while not self._choose(logits, answer.tokens, max_tokens):
                cache.bytes_read = cache.keys_read = 0
                begin = time.perf_counter()
                logits = self._forward(answer.tokens[-1:], position, cache)
                measure.synchronize(self._model.device)
                answer.step_ms.append(1e3 * (time.perf_counter() - begin))
                position += 1
                answer.bytes_read.append(cache.bytes_read)
                answer.read_shares.append(cache.keys_read / (position * len(cache.layers)))
        answer.peak_bytes = cache.peak_bytes
        return answer

    def _attend_by(self, attention: str) -> None:
        if self._model.network.config._attn_implementation != attention:
            self._model.network.set_attn_implementation(attention)

    def _choose(self, logits: Tensor, tokens: list[int], max_tokens: int) -> bool:
        """Adds the most likely token; returns whether it is the last one."""
        if not bool(logits.isfinite().all()):
            raise NumericalError("the logits are NaN or infinite")
        tokens.append(int(logits.argmax()))
        return tokens[-1] in self._model.eos_token_ids or len(tokens) >= max_tokens

    def _forward(self, tokens: Sequence[int], start: int, cache: Any) -> Tensor:
        """Logits [vocabulary] after the last of these tokens, which start at position `start`."""
        device = self._model.device
        positions = torch.arange(start, start + len(tokens), device=device)
        out = self._model.network(
            input_ids=torch.tensor([list(tokens)], device=device),
            position_ids=positions[None],
            cache_position=positions,
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(self._model.network): cache},
        )
        logits: Tensor = out.logits[0, -1]
        return logits


class _CountingCache(DynamicCache):  # type: ignore[misc]
    """A cache that counts what is read of it, and its largest size.

    keys_read: keys passed to attention, of one KV head, summed over layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys_read = self.bytes_read = self.peak_bytes = 0

    def update(self, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """See `DynamicCache`."""
        keys, values = super().update(*given, **named)
        self.keys_read += keys.shape[2]
        self.bytes_read += keys.nbytes + values.nbytes
        layers: list[Any] = self.layers
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        self.peak_bytes = max(self.peak_bytes, held)
        return keys, values


@contextlib.contextmanager
def _applied(press: Any, network: Any) -> Iterator[None]:
    """A context in which kvpress's press is active on the network; None has no effect."""
    if press is None:
        yield
        return
    _, layers = decoder_layers(network)
    own: list[Any] = [layer.self_attn for layer in layers]
    hooks = [one.register_forward_hook(_with_earlier_name, with_kwargs=True) for one in own]
    try:
        with press(network):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _with_earlier_name(_: Any, __: Any, named: dict[str, Any], ___: Any) -> None:
    """Gives later hooks the cache by the name that kvpress reads, transformers' before 5.24."""
    named["past_key_values"] = named[cache_name(named)]


@dataclass(frozen=True, kw_only=True)
class PressCell:
    """The case to measure; `samples`: how many, numbered from 0."""

    task: Task
    length: int
    setup: str
    press: Press
    samples: int

    def __post_init__(self) -> None:
        require_counts(self, "samples")
        require_known("setup", self.setup, SETUPS)


class PressEvaluation:
    """The evaluation of any number of cells with a loaded model."""

    def __init__(self, model: Model) -> None:
        if model.tokenizer is None:
            raise ModelError(f"{model.name!r} has no tokenizer, which tasks need")
        self._model, self._compressed = model, CompressedModel(model)
        self._fingerprint = model_digest(model)
        self._asked = functools.cache(self._make)  # its samples are the same under every press

    def known_by(self, cell: PressCell) -> dict[str, Any]:
        """The fields that identify a cell: lines that agree in all of them are the same
        measurement.
        """
        press, asked = cell.press, self._asked(cell.task)
        return as_stored(
            {
                "fingerprint": self._fingerprint,
                "task": asked.name,
                "task_settings": asked.settings,
                "length": cell.length,
                "setup": cell.setup,
                "policy": f"kvpress:{press.name}",
                "settings": {**press.settings, "interval": press.interval},
                "budget": press.budget,
                "engine": {"max_batch": 1, "attention": press.attention},
            }
        )

    def line(self, cell: PressCell) -> dict[str, Any]:
        """Runs a cell; ConfigError, before it runs, for an invalid one."""
        require_length(self._model, cell.length)
        asked = self._asked(cell.task)
        samples = asked.samples(cell.length, cell.samples)
        requests = asked.requests(samples, cell.setup)
        for one in requests:
            cell.press.prefill(len(one.prompt), len(one.given))
        answers = [
            self._compressed.answer(cell.press, one.prompt, one.given, one.max_tokens)
            for one in requests
        ]
        known, texts = self.known_by(cell), [self._text(answer.tokens) for answer in answers]
        about = {
            "model": self._model.name,
            "method": known["policy"],
            "samples": cell.samples,
        }
        fields = asked.fields(samples, requests, texts)
        return self._header() | about | fields | _costs(answers) | known

    def _make(self, task: Task) -> Answered:
        return Answered(task, self._model)

    def _text(self, tokens: list[int]) -> str:
        return str(self._model.tokenizer.decode(tokens, skip_special_tokens=True))

    def _header(self) -> dict[str, Any]:
        header = measure.header("eval", self._model.device)
        header["command"] = shlex.join(
            ["python", "-m", "keyhole.integrations.kvpress", *sys.argv[1:]]
        )
        header["versions"]["kvpress"] = importlib.metadata.version("kvpress")
        return header


def _costs(answers: list[PressAnswer]) -> dict[str, Any]:
    """Means over all decode steps, their median time, and the largest cache."""
    shares = [share for answer in answers for share in answer.read_shares]
    read = [count for answer in answers for count in answer.bytes_read]
    times = [spent for answer in answers for spent in answer.step_ms]
    return {
        "tokens_generated": statistics.fmean(len(answer.tokens) for answer in answers),
        "decode_steps": len(times),
        "read_share": statistics.fmean(shares) if shares else None,
        "bytes_per_step": statistics.fmean(read) if read else None,
        "step_ms": statistics.median(times) if times else None,
        "peak_bytes": max(answer.peak_bytes for answer in answers),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m keyhole.integrations.kvpress",
        description="Tasks under kvpress's compressors, in the lines of `keyhole eval`.",
    )
    add = parser.add_argument
    add("model", nargs="?", default=TINY, help="folder, hub id, or tiny: the bundled model")
    add("--presses", default="snapkv,tova", metavar="NAMES", help=f"of {', '.join(presses())}")
    add(
        "--budgets",
        default="128,256",
        metavar="TOKENS",
        help="tokens kept of a prompt, per KV head",
    )
    add(
        "--interval",
        type=int,
        metavar="TOKENS",
        help="compress again after this many generated tokens",
    )
    add("--tasks", default="passkey,key_value", metavar="NAMES", help="tasks of `keyhole eval`")
    add(
        "--lengths",
        default="2048",
        metavar="TOKENS",
        help="tokens per sample, including its answer",
    )
    add("--setup", default="prompt", help=f"what is compressed: {', '.join(SETUPS)} or both")
    add("--limit", type=int, default=16, metavar="N", help="samples per cell")
    add("--device", default="auto")
    add("--dtype", default="auto")
    add(
        "--output",
        default="keyhole-eval.jsonl",
        metavar="FILE",
        help="file that lines are added to",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measures the cells that are not stored yet; prints a line for each and adds one to the
    file.
    """
    cells, file = list(_cells(arguments)), LineFile(arguments.output)
    evaluation = PressEvaluation(load(arguments.model, arguments.device, arguments.dtype))
    refused = 0
    for cell in cells:
        press, length = cell.press, cell.length
        name = f"{cell.task.name} {length} {cell.setup} {press.name} {press.budget}"
        stored = file.find(evaluation.known_by(cell), cell.samples)
        try:
            line = stored or evaluation.line(cell)
        except KeyholeError as error:
            print(f"{name}: refused: {error}", file=sys.stderr)
            refused += 1
            continue
        if stored is None:
            file.add(line)
        print(_told(name, line) + ("" if stored is None else ", stored before"), flush=True)
    return 1 if refused else 0


def _told(name: str, line: Mapping[str, Any]) -> str:
    """A cell for people; step figures only if there was a decode step."""
    if not line["decode_steps"]:
        return f"{name}: score {line['score']:.3f}"
    return (
        f"{name}: score {line['score']:.3f}, {100 * line['read_share']:.1f} % of keys read, "
        f"{line['step_ms']:.1f} ms a step"
    )


def _cells(arguments: argparse.Namespace) -> Iterator[PressCell]:
    """All combinations; ConfigError for invalid arguments."""
    made = [
        make_press(spec.name, budget, _settings(spec), arguments.interval)
        for spec in registry.parse(arguments.presses)
        for budget in _numbers(arguments.budgets, "--budgets")
    ]
    bundled = is_tiny(arguments.model)
    parsed = parse(arguments.tasks, bundled=bundled)
    tasks = answered(parsed, "uses teacher forcing, which is not supported with presses")
    lengths = _numbers(arguments.lengths, "--lengths")
    setups = [part.strip() for part in arguments.setup.split(",")]
    for task, length, setup, press in itertools.product(tasks, lengths, setups, made):
        yield PressCell(task=task, length=length, setup=setup, press=press, samples=arguments.limit)


def _settings(spec: Spec) -> dict[str, Any]:
    """The settings in their JSON types, because kvpress does not declare types."""
    try:
        return {name: json.loads(value) for name, value in spec.settings}
    except ValueError as error:
        raise ConfigError(
            f"settings in {spec.text!r} must be numbers, true or false, such as "
            "snapkv:window_size=32"
        ) from error


def _numbers(text: str, flag: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r} must be whole numbers, separated by commas") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; errors for users are one line."""
    try:
        return run(_parser().parse_args(arguments))
    except KeyholeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
