"""Train the bundled model from nothing, with one command.

    python -m recipes.tiny_model.train --ranks 2 --tokens 25e6
    python -m recipes.tiny_model.train --ranks 2 --resume
    python -m recipes.tiny_model.train --ranks 2 --resume --cooldown 5e6
    python -m recipes.tiny_model.train --curriculum hops --start M --repeat-layers 1 2 --out hops
    python -m recipes.tiny_model.train --curriculum long --start HOPS --tokens 9e6 --out long

With `--start` and `--repeat-layers` a model's folder M begins deeper.

The run ends after `--tokens`, when the learning rate has reached zero; `--minutes`, Ctrl-C and
SIGTERM end it early with a snapshot, from which `--resume` continues exactly.
When time runs out, `--cooldown` decays the rate to zero within that many more tokens.
`export` turns the last snapshot into a model folder.
"""

import argparse
import fcntl
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

# Set before torch starts its threads: idle ones must not spin on a core that others need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from torch.multiprocessing.spawn import spawn
from tqdm.auto import tqdm

from recipes.tiny_model.curriculum import CURRICULA
from recipes.tiny_model.initial import MATCH_LAYERS
from recipes.tiny_model.network import HIDDEN_SIZE
from recipes.tiny_model.trainer import SNAPSHOT_FILE, Ranks, Trainer, TrainerSettings, joined

_SAVE_EVERY = 180.0
"""Seconds between snapshots."""


def run(settings: TrainerSettings, ranks: Ranks, stop: Event) -> None:
    """Train until the schedule ends, the minutes are over or `stop` is set; then save."""
    trainer = Trainer(settings, ranks)
    started = saved = time.monotonic()
    losses: list[float] = []
    since = (started, trainer.tokens)
    bar = tqdm(
        total=trainer.schedule.total,
        initial=trainer.tokens,
        unit="token",
        unit_scale=True,
        disable=None if ranks.leads else True,  # None: no bar without a terminal
    )
    for batch in trainer.batches():
        over = settings.minutes is not None and time.monotonic() - started > 60 * settings.minutes
        before = trainer.tokens
        loss, stopping = trainer.train_step(batch, stop.is_set() or over)
        losses.append(loss)
        bar.update(trainer.tokens - before)
        bar.set_postfix_str(f"loss {loss:.3f}")
        finished = trainer.tokens >= trainer.schedule.total
        every = settings.examine_every
        if finished or trainer.tokens // every > before // every:
            seconds = time.monotonic() - since[0]
            line = {
                "step": trainer.step,
                "tokens": trainer.tokens,
                "loss": round(sum(losses) / len(losses), 4),
                "rate": round(trainer.schedule.factor(trainer.tokens), 4),
                "tokens_per_s": round((trainer.tokens - since[1]) / seconds),
                "exact": trainer.examine(),
            }
            if ranks.leads:
                with (settings.out / "log.jsonl").open("a") as log:
                    log.write(json.dumps(line) + "\n")
            losses, since = [], (time.monotonic(), trainer.tokens)
        if finished or stopping:
            break
        if time.monotonic() - saved > _SAVE_EVERY:
            trainer.save()
            saved = time.monotonic()
    trainer.save()
    bar.close()


def _run_rank(rank: int, settings: TrainerSettings, stop: Event, meeting_point: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with joined(rank, settings.ranks, meeting_point) as ranks:
        run(settings, ranks, stop)


def train(settings: TrainerSettings) -> None:
    """Run the training in the number of processes that the settings give."""
    settings.out.mkdir(parents=True, exist_ok=True)
    if (settings.out / SNAPSHOT_FILE).exists() and not settings.resume:
        raise ValueError(f"{settings.out} holds a run; resume it or choose another folder")
    stop = multiprocessing.get_context("spawn").Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with only_run(settings.out):
        if settings.ranks == 1:
            run(settings, Ranks(), stop)
            return
        with tempfile.TemporaryDirectory() as folder:
            arguments = (settings, stop, Path(folder) / "ranks")
            spawn(_run_rank, arguments, nprocs=settings.ranks)


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Hold the folder: a second run would overwrite the snapshots of the first."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is in use by another run; wait for its end") from None
        yield


def _count(text: str) -> int:
    return int(float(text))


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/tiny"), help="folder for snapshot and log"
    )
    parser.add_argument("--tokens", type=_count, help="tokens of the whole run")
    parser.add_argument("--minutes", type=float, help="stop after this long, to be resumed")
    parser.add_argument("--cooldown", type=_count, help="end within this many more tokens")
    parser.add_argument("--resume", action="store_true", help="go on from the snapshot in OUT")
    parser.add_argument("--ranks", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--batch-scale",
        type=float,
        default=1,
        help="multiply the batches (GPU: 8; .5 with two ranks for the steps of one)",
    )
    parser.add_argument("--workers", type=int, default=0, help="processes that prepare rows")
    parser.add_argument("--start", type=Path, help="model folder whose weights to begin with")
    parser.add_argument(
        "--repeat-layers",
        type=int,
        nargs="+",
        default=[],
        help="with --start: layers, one after the other, of which copies are inserted behind them",
    )
    parser.add_argument("--curriculum", choices=CURRICULA, default="single")
    parser.add_argument(
        "--stretch",
        type=float,
        default=1,
        help="multiply the tokens of every stage of the curriculum, as for larger batches",
    )
    parser.add_argument(
        "--steadiness",
        type=float,
        default=0,
        metavar="WEIGHT",
        help="also ask for attention that changes slowly",
    )
    parser.add_argument(
        "--adamw-rate",
        type=float,
        help="AdamW for everything, at this rate, as for a model that is trained already",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of products; float32 is faster on processors without bfloat16",
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument(
        "--hidden-size", type=int, default=HIDDEN_SIZE, help="half of the width of the MLP"
    )
    parser.add_argument(
        "--match-layers",
        type=int,
        nargs="*",
        default=MATCH_LAYERS,
        help="layers whose look-up is built in at the start; without a number, none",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examine-every", type=_count, default=2_000_000, help="tokens")
    parser.add_argument("--examine-items", type=int, default=16, help="per task and length")
    parser.add_argument("--examine-lengths", type=int, nargs="+", default=[512, 2048])
    arguments = parser.parse_args()
    if arguments.start is not None and arguments.match_layers is not MATCH_LAYERS:
        parser.error("--match-layers sets initial weights, and --start has its own; leave one out")
    if not arguments.stretch > 0:
        parser.error(f"--stretch {arguments.stretch}: a number above 0 is needed")
    if not arguments.steadiness >= 0:
        parser.error(f"--steadiness {arguments.steadiness}: a number of at least 0 is needed")
    if arguments.adamw_rate is not None and not arguments.adamw_rate > 0:
        parser.error(f"--adamw-rate {arguments.adamw_rate}: a number above 0 is needed")
    train(TrainerSettings(**vars(arguments)))


if __name__ == "__main__":
    main()
