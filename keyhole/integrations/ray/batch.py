"""Answers files of requests on an actor pool of Ray Data, each line exactly once.

    python -m keyhole.integrations.ray.batch s3://b/in.jsonl s3://b/out model=PLACE num_replicas=4

The input has the format of `keyhole batch`, at any URL that fsspec supports. The output is a folder
with a file of answers for each part of the input. One actor computes a part and writes it
atomically, so a part that is computed again, because an actor or the job failed, replaces the
first. Repeating the command computes only the missing parts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import ray
from ray.data import ActorPoolStrategy

from keyhole.batch.files import (
    REPEATED,
    BatchLine,
    BatchRequest,
    as_line,
    is_answer,
    lines_of,
    read_request,
    requests_of,
)
from keyhole.batch.run import BatchApp, BatchOutcome
from keyhole.errors import ConfigError, KeyholeError
from keyhole.integrations.ray.replica import make_llm
from keyhole.integrations.ray.settings import RaySettings, read_settings
from keyhole.integrations.ray.start import check_model
from keyhole.server.settings import BATCH_SETTINGS

#: Lines of a part: the work lost when an actor fails, and many times the requests of a step.
PART_LINES = 256
_MANIFEST = "_input.json"
#: The most blocks of Ray Data; a block holds one or more parts.
_MOST_BLOCKS = 1000


@dataclass(frozen=True, kw_only=True)
class BatchPart:
    """Bytes of the input from start to stop. first: the number of the first line.

    lines: number of lines that are not blank. repeated: by line number, the error code and message
    of lines whose custom_id an earlier line has.
    """

    index: int
    start: int
    stop: int
    first: int
    lines: int
    repeated: dict[int, tuple[str, str]]

    @property
    def name(self) -> str:
        """Name of its output file."""
        return f"part-{self.index:06}.jsonl"


def run(source: str, output: str, given: Mapping[str, Any]) -> BatchOutcome:
    """Answers every line of `source` that has no answer yet in the folder `output`.

    given: names and values as `app` takes them; num_replicas actors answer, each with num_cpus and
    num_gpus. Starts Ray if it is not running.
    ConfigError for invalid settings, input or output.
    """
    settings = read_settings(given)
    check_model(settings.model, given.get("policy"))
    parts, manifest = plan(source)
    folder = BatchFolder(output)
    folder.claim(manifest, source)
    missing = [part for part in parts if not folder.has(part)]
    lines, answered = (sum(part.lines for part in some) for some in (parts, missing))
    if missing:
        rows = [{"part": json.dumps(dataclasses.asdict(part))} for part in missing]
        found = ray.data.from_items(rows, override_num_blocks=min(len(rows), _MOST_BLOCKS))
        options = dict(settings.deployment["ray_actor_options"])
        found.map_batches(
            PartWorker,
            fn_constructor_args=(source, output, settings),
            batch_size=1,
            compute=_actors(settings.deployment),
            num_cpus=options.pop("num_cpus", 1),
            **options,
        ).take_all()
    failed = sum(folder.errors(part) for part in parts)
    return BatchOutcome(lines=lines, answered=answered, kept=lines - answered, failed=failed)


def plan(source: str) -> tuple[list[BatchPart], str]:
    """The parts, and a string that identifies this input; ConfigError if it cannot be read."""
    parts: list[BatchPart] = []
    digest, position = hashlib.sha256(), 0
    start, first, lines = 0, 1, 0
    repeated: dict[int, tuple[str, str]] = {}

    def texts(file: Any) -> Iterator[bytes]:
        nonlocal position
        for text in file:
            position += len(text)
            yield text

    def end(number: int) -> None:
        nonlocal start, first, lines, repeated
        parts.append(
            BatchPart(
                index=len(parts),
                start=start,
                stop=position,
                first=first,
                lines=lines,
                repeated=repeated,
            )
        )
        start, first, lines, repeated = position, number + 1, 0, {}

    try:
        with fsspec.open(source, "rb") as file:
            for request in requests_of(lines_of(texts(file))):
                digest.update(request.line.id.encode())
                lines += 1
                if request.problem is not None and request.problem[0] == REPEATED:
                    repeated[request.line.number] = request.problem
                if lines == PART_LINES:
                    end(request.line.number)
    except (OSError, ImportError, ValueError) as error:
        raise ConfigError(f"{source!r} cannot be read: {error}") from error
    if lines:
        end(0)
    return parts, f"{PART_LINES} {digest.hexdigest()}"


class BatchFolder:
    """The output folder. ConfigError if it cannot be used."""

    def __init__(self, place: str) -> None:
        self.place = place
        try:
            self._files, self._folder = fsspec.core.url_to_fs(place)
            self._files.makedirs(self._folder, exist_ok=True)
        except (OSError, ImportError, ValueError) as error:
            raise ConfigError(f"{place!r} cannot be a folder of answers: {error}") from error

    def claim(self, manifest: str, source: str) -> None:
        """Records which input the answers are for; ConfigError if it holds answers to another."""
        path = self._path(_MANIFEST)
        if self._files.exists(path):
            known = json.loads(self._files.cat_file(path))["input"]
            if known != manifest:
                raise ConfigError(
                    f"{self.place!r} has answers to requests that are not in {source!r}; name "
                    "another output"
                )
            return
        others = self._files.ls(self._folder, detail=False)
        if others:
            raise ConfigError(
                f"{self.place!r} is not a folder of answers, because it has "
                f"{os.path.basename(others[0])!r}; name another output"
            )
        self._write(_MANIFEST, json.dumps({"input": manifest}).encode())

    def has(self, part: BatchPart) -> bool:
        """Whether the part is answered."""
        return bool(self._files.exists(self._path(part.name)))

    def errors(self, part: BatchPart) -> int:
        """How many lines of the part have errors."""
        texts = self._files.cat_file(self._path(part.name)).splitlines()
        return sum(not is_answer(json.loads(text)) for text in texts)

    def add(self, part: BatchPart, entries: Sequence[Mapping[str, Any]]) -> None:
        """Writes the answers of a part, atomically."""
        self._write(part.name, b"".join(as_line(entry) for entry in entries))

    def _path(self, name: str) -> str:
        return f"{self._folder.rstrip('/')}/{name}"

    def _write(self, name: str, data: bytes) -> None:
        # Written under another name and then renamed: a file with its final name is complete.
        beside = self._path(f".{name}.{uuid.uuid4().hex}")
        try:
            self._files.pipe_file(beside, data)
            self._files.mv(beside, self._path(name))
        except OSError as error:
            raise ConfigError(f"{self.place!r} cannot be written: {error}") from error


class PartWorker:
    """An actor with an engine, which answers parts."""

    def __init__(self, source: str, output: str, settings: RaySettings) -> None:
        self._source = source
        self._folder = BatchFolder(output)
        server = {name: value for name, value in settings.server.items() if name in BATCH_SETTINGS}
        self._app = BatchApp(make_llm(settings), server)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Answers a batch of parts and returns it."""
        for text in rows["part"]:
            given = json.loads(str(text))
            repeated = {int(number): tuple(p) for number, p in given.pop("repeated").items()}
            part = BatchPart(**given, repeated=repeated)
            if not self._folder.has(part):  # an actor that failed may have written it
                self._folder.add(part, asyncio.run(self._answer(part)))
        return rows

    async def _answer(self, part: BatchPart) -> list[dict[str, Any]]:
        return [entry async for entry in self._app.answers(self._requests(part))]

    def _requests(self, part: BatchPart) -> Iterator[BatchRequest]:
        with fsspec.open(self._source, "rb") as file:
            file.seek(part.start)
            texts = file.read(part.stop - part.start).split(b"\n")
        for line in lines_of(texts):
            numbered = BatchLine(part.first + line.number - 1, line.text)
            request = read_request(numbered)
            problem = part.repeated.get(numbered.number, request.problem)
            yield dataclasses.replace(request, problem=problem)


def _actors(deployment: Mapping[str, Any]) -> ActorPoolStrategy:
    scaling = deployment.get("autoscaling_config")
    if scaling is None:
        return ActorPoolStrategy(size=deployment["num_replicas"])
    return ActorPoolStrategy(
        min_size=max(1, scaling.get("min_replicas", 1)), max_size=scaling.get("max_replicas")
    )


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    if len(arguments) < 2 or not all("=" in one for one in arguments[2:]):
        print("usage: python -m keyhole.integrations.ray.batch INPUT OUTPUT NAME=VALUE ...")
        return 2
    try:
        given = dict(one.split("=", 1) for one in arguments[2:])
        done = run(arguments[0], arguments[1], given)
    except KeyholeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{done.lines} lines: {done.answered} answered now, {done.kept} before, {done.failed} with "
        f"errors; {arguments[1]}"
    )
    return 1 if done.failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
