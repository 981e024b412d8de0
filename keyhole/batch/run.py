"""Answers a file of requests into another file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from tqdm.auto import tqdm

from keyhole.async_llm import AsyncLLM
from keyhole.batch.answer import answers, batch_app
from keyhole.batch.files import BatchOutput, BatchRequest, Shard, is_answer, read_lines, requests_of
from keyhole.errors import ConfigError
from keyhole.llm import LLM


@dataclass(frozen=True, kw_only=True)
class BatchOutcome:
    """Numbers of lines. lines: of the shard. answered: by this run. kept: answered by earlier runs.
    failed: errors among both.
    """

    lines: int
    answered: int
    kept: int
    failed: int


def run_batch(
    source: str | Path,
    output: str | Path,
    make_llm: Callable[[], LLM],
    *,
    shard: Shard | None = None,
    settings: dict[str, Any] | None = None,
) -> BatchOutcome:
    """Answers every line of `source` that has no answer in `output` yet.

    make_llm: called if there is such a line. settings: values for some of `BATCH_SETTINGS`. If
    stderr is a terminal, it shows a progress bar.

    ConfigError for files that cannot be read or written, and for an output with answers to other
    lines than those of `source`; StorageFullError for a full disk.
    """
    part = Shard() if shard is None else shard
    if Path(source).exists() and not Path(source).is_file():
        raise ConfigError(f"{str(source)!r} must be a regular file, because it is read twice")
    if Path(output).exists() and Path(source).exists() and Path(output).samefile(source):
        raise ConfigError(
            f"input and output are the same file, {str(output)!r}; name another output"
        )
    ids = {line.id: part.has(line) for line in read_lines(source)}
    with BatchOutput(output) as file:
        _check_same_input(file, ids, source)
        wanted = [name for name, mine in ids.items() if mine]
        kept = sum(name in file.statuses for name in wanted)
        if kept < len(wanted):
            requests = (
                request
                for request in requests_of(read_lines(source))
                if part.has(request.line) and request.line.id not in file.statuses
            )
            llm = make_llm()
            app = batch_app(AsyncLLM(llm), settings or {})
            # Twice the batch, so that a request is already waiting when another one ends.
            at_once = 2 * llm.engine.config.max_batch
            asyncio.run(_answer_all(app, requests, at_once, file, (kept, len(wanted))))
            file.sync()
        failed = sum(not file.statuses[name] for name in wanted)
    return BatchOutcome(lines=len(wanted), answered=len(wanted) - kept, kept=kept, failed=failed)


async def _answer_all(
    app: FastAPI,
    requests: Iterable[BatchRequest],
    at_once: int,
    file: BatchOutput,
    progress: tuple[int, int],
) -> None:
    (kept, total), failed = progress, 0
    with tqdm(total=total, initial=kept, desc="lines", unit="line", disable=None) as bar:
        async with aclosing(answers(app, requests, at_once)) as entries:
            async for entry in entries:
                file.add(entry)
                failed += not is_answer(entry)
                bar.set_postfix(failed=failed, refresh=False)
                bar.update()


def _check_same_input(file: BatchOutput, ids: dict[str, bool], source: str | Path) -> None:
    others = [name for name in file.statuses if name not in ids]
    if others:
        raise ConfigError(
            f"{str(file.path)!r} has {len(others)} answers to requests that are not in "
            f"{str(source)!r}; name another output"
        )
