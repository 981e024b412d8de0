"""Load on a running server: times to the first token, between tokens and of whole answers.

Requests are streams of /v1/completions, with random prompts of token ids and `ignore_eos`, so that
every answer has the requested length. A closed loop keeps `concurrency` requests running; an open
loop sends them at `rate`, without waiting for answers (Poisson arrivals). Times are measured by the
client: from sending a request to the event that brings a token.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.bench.settings import ServeSettings
from keyhole.errors import ConfigError, KeyholeError

_KEY = "KEYHOLE_API_KEY"
_TEXT = "a load of words to draw tokens from: 0 1 2 3 4 5 6 7 8 9"
_PERCENTILES = (50, 90, 99)
_DATA, _DONE, _END = b"data: ", b"data: [DONE]", b"\n\n"


@dataclass
class RequestTimes:
    """A request and its timing, in seconds of `time.perf_counter`.

    times: of each event that brought tokens. tokens: as counted by the server. error: the kind of
    failure, "" without one; reason: the server's own words for it.
    """

    start: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""
    reason: str = ""

    @property
    def first_ms(self) -> float:
        """Time to the first token."""
        return 1e3 * (self.times[0] - self.start)

    @property
    def answer_ms(self) -> float:
        """Time to the last token."""
        return 1e3 * (self.times[-1] - self.start)

    @property
    def gaps_ms(self) -> list[float]:
        """Times between consecutive events."""
        return [1e3 * (b - a) for a, b in itertools.pairwise(self.times)]


def run(settings: ServeSettings) -> dict[str, Any]:
    """Sends the load; returns the part of a line of results that is specific to this benchmark.

    ConfigError without aiohttp, or if the server cannot be reached.
    """
    return {"settings": asdict(settings), **asyncio.run(measure_load(settings))}


async def measure_load(settings: ServeSettings) -> dict[str, Any]:
    """The model and the results, for callers with an event loop."""
    import aiohttp

    key = os.environ.get(_KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        settings.url, headers=headers, connector=connector, timeout=timeout
    ) as session:
        try:
            model = (await _json(session.get("/v1/models")))["data"][0]["id"]
            tokenized = await _json(session.post("/tokenize", json={"prompt": _TEXT}))
            ids, longest = tokenized["tokens"], tokenized.get("max_model_len")
        except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
            said = str(error) if isinstance(error, aiohttp.ClientError) else repr(error)
            raise ConfigError(f"{settings.url!r} does not respond like a server: {said}") from error
        bodies = make_bodies(settings, model, ids)
        if isinstance(longest, int):
            _check_lengths(bodies, longest)
        begin = time.perf_counter()
        samples = await _send(settings, [lambda b=body: _stream(session, b) for body in bodies])  # type: ignore[misc]
        seconds = time.perf_counter() - begin
    return {"model": model, "results": [summary(samples, seconds, len(bodies), settings)]}


def make_bodies(settings: ServeSettings, model: str, ids: Sequence[int]) -> list[dict[str, Any]]:
    """The request bodies. ids: token ids to draw prompts from."""
    draw = random.Random(settings.seed)
    lengths = _read(settings.lengths) if settings.lengths is not None else None
    found = []
    for i in range(settings.requests):
        if lengths is None:
            prompt, answer = (
                draw.randint(*pair) for pair in (settings.prompt_range, settings.answer_range)
            )
        else:
            prompt, answer = lengths[i % len(lengths)]
        found.append(
            {
                "model": model,
                "prompt": draw.choices(ids, k=prompt),
                "max_tokens": answer,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
    return found


def _read(path: str) -> list[tuple[int, int]]:
    """Lengths of prompts and answers, from JSON lines."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
        found = [(int(row["prompt_tokens"]), int(row["completion_tokens"])) for row in rows]
    except (OSError, ValueError, OverflowError, KeyError, TypeError) as error:
        raise ConfigError(f"lengths {path!r} cannot be read: {error!r}") from error
    if not found or min(map(min, found)) < 1:
        raise ConfigError(f"lengths {path!r} must have lines of numbers >= 1")
    return found


def _check_lengths(bodies: Sequence[dict[str, Any]], longest: int) -> None:
    """Refuses an answer that the server would end early; its tokens would be missing silently."""
    for body in bodies:
        prompt, answer = len(body["prompt"]), body["max_tokens"]
        if prompt + answer > longest:
            raise ConfigError(
                f"a prompt of {prompt} tokens and an answer of {answer} are more than the server's "
                f"max_model_len {longest}; name shorter lengths"
            )


async def _json(request: Any) -> Any:
    async with request as answer:
        answer.raise_for_status()
        return await answer.json()


_Stream = Callable[[], Coroutine[Any, Any, RequestTimes]]


async def _send(settings: ServeSettings, streams: Sequence[_Stream]) -> list[RequestTimes]:
    """The requests that finished before the time limit."""
    limit = asyncio.Semaphore(settings.concurrency or len(streams))
    draw = random.Random(settings.seed)
    done: list[RequestTimes] = []

    async def one(stream: _Stream) -> None:
        try:
            done.append(await stream())
        finally:
            limit.release()

    tasks: list[asyncio.Task[None]] = []
    try:
        async with asyncio.timeout(settings.time_limit):
            for stream in streams:
                if settings.rate is not None:
                    await asyncio.sleep(draw.expovariate(settings.rate))
                await limit.acquire()
                tasks.append(asyncio.create_task(one(stream)))
            await asyncio.gather(*tasks)
    except TimeoutError:
        pass
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return done


async def _stream(session: Any, body: dict[str, Any]) -> RequestTimes:
    """Runs one request to its end."""
    import aiohttp

    sample = RequestTimes(time.perf_counter())
    event = rest = b""
    try:
        async with session.post("/v1/completions", json=body) as answer:
            if answer.status != 200:
                sample.error = f"status {answer.status}"
                sample.reason = _message(await answer.read())
                return sample
            # Reads whole chunks instead of lines, to save CPU time: the client may share the
            # server's cores.
            async for data in answer.content.iter_any():
                now = time.perf_counter()
                *events, rest = (rest + data).split(_END)
                for one in events:
                    if one != _DONE:
                        sample.times.append(now)
                        event = one
    except (aiohttp.ClientError, OSError) as error:
        sample.error = type(error).__name__
        return sample
    try:
        last = json.loads(event.removeprefix(_DATA))
        if "error" in last:
            sample.error, sample.reason = str(last["error"]["type"]), _message(event[len(_DATA) :])
        else:
            sample.tokens = last["usage"]["completion_tokens"]
            sample.times.pop()  # the event with the usage
    except (ValueError, KeyError, TypeError):  # a proxy, or a server that ends, cuts it off
        sample.error = "incomplete answer"
    return sample


def _message(body: bytes) -> str:
    """The message of an error's body; what a proxy answers has none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def summary(
    samples: Sequence[RequestTimes], seconds: float, wanted: int, settings: ServeSettings
) -> dict[str, Any]:
    """The summary for a line of results. KeyholeError if no request was answered."""
    good = [sample for sample in samples if not sample.error]
    errors = Counter(sample.error for sample in samples if sample.error)
    if not good:
        why = [f"{number} ended with {error}" for error, number in errors.items()]
        if len(samples) < wanted:
            why.append(f"{wanted - len(samples)} took longer than time_limit {settings.time_limit}")
        reason = next((f"; {sample.reason}" for sample in samples if sample.reason), "")
        raise KeyholeError(f"none of {wanted} requests was answered: {', '.join(why)}{reason}")
    within = [sample for sample in good if _is_good(sample, settings)]
    return {
        "requests": wanted,
        "answered": len(good),
        "failed": dict(errors),
        "unfinished": wanted - len(samples),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "tokens_per_s": sum(sample.tokens for sample in good) / seconds,
        "first_token_ms": _percentiles([sample.first_ms for sample in good]),
        "between_tokens_ms": _percentiles([gap for sample in good for gap in sample.gaps_ms]),
        "answer_ms": _percentiles([sample.answer_ms for sample in good]),
        "goodput_per_s": len(within) / seconds,
    }


def _is_good(sample: RequestTimes, settings: ServeSettings) -> bool:
    gaps = sample.gaps_ms
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    first, between = settings.goodput_first_ms, settings.goodput_between_ms
    return sample.first_ms <= first and mean <= between


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = np.percentile(values, _PERCENTILES)
    return {f"p{p}": float(value) for p, value in zip(_PERCENTILES, found, strict=True)}
