"""Runs a training to its end, with a progress bar and atomic snapshots."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from keyhole.errors import ConfigError, NumericalError, why
from keyhole.retrieval.training.distill import Distiller
from keyhole.retrieval.training.gate_distill import GateDistiller
from keyhole.retrieval.training.run import StepProgress, TrainingRun
from keyhole.retrieval.training.training_config import Corpus, TrainingConfig

#: The snapshot of an unfinished run, in its folder.
SNAPSHOT = "training.pt"
_SAVE_EVERY = 120.0
"""Seconds between snapshots."""
_SMOOTH = 0.95
"""Smoothing of the progress figures: they are means of about 20 steps."""


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """The result of a run; loss, recall and window are smoothed, and None without any step.

    recall, window: shares of the target's attention at a budget of an eighth of the text, for the
    head or gate on texts that it had not learned from yet, and for the newest tokens.
    """

    finished: bool
    steps: int
    tokens: int
    seconds: float
    loss: float | None
    recall: float | None
    window: float | None


def train(
    network: nn.Module,
    corpus: Corpus,
    config: TrainingConfig,
    folder: str | Path,
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> TrainingOutcome:
    """Trains until all tokens are seen or `stop()` is true, then writes the result or a snapshot.

    ConfigError if the folder holds a head or gate, or a run and `resume` is not set;
    NumericalError, with a snapshot of the last good step, for a NaN loss or gradient.
    """
    folder = Path(folder)
    state = _found(folder, resume)
    kind = GateDistiller if config.objective == "gate" else Distiller
    distiller: TrainingRun = kind(network, corpus, config)
    if state is not None:
        distiller.restore(state)
    else:  # a disk without room for a snapshot is noticed now, not after hours
        save(folder, distiller.state())
        (folder / SNAPSHOT).unlink()
    started = saved = time.monotonic()
    with tqdm(
        total=distiller.config.tokens,
        initial=distiller.tokens,
        unit="token",
        unit_scale=True,
        disable=None,  # no bar without a terminal
    ) as bar:
        while not (distiller.finished or stop()):
            before = distiller.tokens
            try:
                progress = distiller.train_step()
            except NumericalError as error:
                save(folder, distiller.state())
                raise NumericalError(f"{error}; the previous step is saved in {folder}") from error
            shown = distiller.shown = _smoothed(distiller.shown, progress)
            bar.update(distiller.tokens - before)
            bar.set_postfix_str(
                f"loss {shown['loss']:.3f}, recall {shown['recall']:.1%} "
                f"(window {shown['window']:.1%})"
            )
            if time.monotonic() - saved > _SAVE_EVERY:
                save(folder, distiller.state())
                saved = time.monotonic()
    save(folder, distiller.state())
    if distiller.finished:
        distiller.save_pretrained(folder)
        (folder / SNAPSHOT).unlink()
    return TrainingOutcome(
        finished=distiller.finished,
        steps=distiller.step,
        tokens=distiller.tokens,
        seconds=time.monotonic() - started,
        loss=distiller.shown.get("loss"),
        recall=distiller.shown.get("recall"),
        window=distiller.shown.get("window"),
    )


def save(folder: Path, state: dict[str, Any]) -> None:
    """Writes a snapshot next to the old one and renames it, so that there is always a complete
    one.
    """
    new = folder / f"{SNAPSHOT}.new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with new.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # or a power loss could leave a renamed file without its bytes
        os.replace(new, folder / SNAPSHOT)
    except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
        if folder.is_dir():
            new.unlink(missing_ok=True)
        raise ConfigError(
            f"the snapshot cannot be written to {str(folder)!r}: {error}; free disk space, or use "
            "another output folder"
        ) from error


#: What torch raises for a file that is not, or not wholly, what it wrote.
_DAMAGED = (
    *(RuntimeError, EOFError, pickle.UnpicklingError, ValueError),
    *(KeyError, TypeError, AttributeError, IndexError),
)


def _found(folder: Path, resume: bool) -> dict[str, Any] | None:
    """The state to resume from, None for a new run."""
    path = folder / SNAPSHOT
    if (folder / "config.json").is_file() and not path.is_file():
        raise ConfigError(f"{str(folder)!r} has a finished head or gate; use another output folder")
    if not resume:
        if path.is_file():
            raise ConfigError(
                f"{str(folder)!r} has an unfinished run; continue it with --resume, or use another "
                "output folder"
            )
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        _ = state["config"], state["weights"]
        return state
    except FileNotFoundError as error:
        raise ConfigError(f"{str(folder)!r} has no run to resume") from error
    except OSError as error:
        raise ConfigError(f"the snapshot {str(path)!r} cannot be read: {why(error)}") from error
    except _DAMAGED as error:  # without torch's text, whose advice is to load it unsafely
        raise ConfigError(
            f"the snapshot {str(path)!r} is damaged, or not a snapshot of `keyhole train-head` "
            f"({type(error).__name__}); start again in another folder"
        ) from error


def config_of(folder: str | Path) -> TrainingConfig | None:
    """The training config of the run in a folder; None if there is none."""
    if not (Path(folder) / SNAPSHOT).is_file():
        return None
    state = _found(Path(folder), True)
    assert state is not None
    try:
        return TrainingConfig(**state["config"])
    except TypeError as error:
        raise ConfigError(
            f"the run in {str(folder)!r} was made by another version of Keyhole ({error}); finish "
            "it with that version, or start again in another folder"
        ) from error


def _smoothed(shown: dict[str, float], progress: StepProgress) -> dict[str, float]:
    new = {"loss": progress.loss, "recall": progress.recall, "window": progress.window}
    return {name: _SMOOTH * shown.get(name, x) + (1 - _SMOOTH) * x for name, x in new.items()}
