"""Many requests of mixed kinds to a server, which must return to its initial state.

    make soak                     # 100,000 requests; run it again to resume where it stopped
    python -m benchmarks.serving.soak --requests 1000

Requests are completions and chats, whole and streamed, questions over documents, storing, reading
and removing documents, searches, and many kinds of invalid requests; a third of the clients
disconnect at a random moment, some read slowly. After each thousand the server must hold no page
and no request, and its open files and resident memory are recorded. At the end it must have as many
files as after the first tenth, and memory within 10 % of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import aiohttp

from benchmarks.serving.server import serving

_PART = 1000
#: Concurrent clients.
_CLIENTS = 24
#: Growth of resident memory after the first tenth that counts as noise of the allocator.
_GROWTH = 1.10
_WORDS = "the blue box is behind the red lamp and nobody has seen it since noon".split()
_DOCUMENTS = 6
#: Statuses of an answer to an invalid request.
_REFUSED = {400, 404, 405, 411, 413, 415, 422}


def main() -> None:
    """Runs or resumes; exits with 1 if the server does not return to its initial state."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--state", help="JSON file with the state, to resume from")
    parser.add_argument("--documents", help="folder of the documents; default: next to the state")
    arguments = parser.parse_args()
    state = Path(arguments.state) if arguments.state else None
    kept = json.loads(state.read_text()) if state and state.is_file() else {"notes": []}
    notes: list[dict[str, Any]] = kept["notes"]
    # A new process has new memory, so earlier parts count only as done.
    begun = len(notes)
    with serving(*_flags(arguments.documents)) as (address, process):
        while len(notes) * _PART < arguments.requests:
            count = min(_PART, arguments.requests - len(notes) * _PART)
            notes.append(asyncio.run(part(address, process, count, seed=len(notes))))
            print(json.dumps(notes[-1]), flush=True)
            if state:
                state.write_text(json.dumps({"notes": notes}))
    faults = [fault for note in notes for fault in note["faults"]]
    faults += grown(notes[begun:])
    for fault in faults:
        print(f"FAULT: {fault}")
    print(f"{sum(sum(note['answers'].values()) for note in notes)} requests, {len(faults)} faults")
    sys.exit(bool(faults))


def _flags(documents: str | None) -> list[str]:
    flags = ["--max-batch", "16", "--memory", "64MiB", "--max-body", "1000000"]
    # Some of the invalid requests ask for as much as possible.
    flags += ["--max-queue", "64", "--max-length", "512"]
    return [*flags, "--documents", documents] if documents else flags


def grown(notes: list[dict[str, Any]]) -> list[str]:
    """What has grown since the first tenth; empty with fewer than three parts."""
    if len(notes) < 3:
        return []
    first, last = notes[max(1, len(notes) // 10)], notes[-1]
    found = []
    if last["resident_bytes"] > _GROWTH * first["resident_bytes"]:
        found.append(f"memory grew from {first['resident_bytes']} to {last['resident_bytes']}")
    if last["files"] > first["files"] + 2:
        found.append(f"open files grew from {first['files']} to {last['files']}")
    return found


async def part(address: str, process: int, count: int, seed: int) -> dict[str, Any]:
    """Sends `count` requests, waits until the server is idle, and records its state."""
    answers: Counter[str] = Counter()
    faults: list[str] = []
    limit = asyncio.Semaphore(_CLIENTS)
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(address, timeout=timeout, connector=connector) as session:

        async def one(number: int) -> None:
            async with limit:
                kind, fault = await request(session, random.Random(f"{seed} {number}"))
                answers[kind] += 1
                if fault:
                    faults.append(fault)

        await asyncio.gather(*(one(number) for number in range(count)))
        held = await idle(session)
        faults += held
    return {"answers": dict(answers), "faults": faults, **usage(process)}


async def request(session: Any, draw: random.Random) -> tuple[str, str]:
    """Sends a request of a random kind; returns the kind and the fault of its answer, if any."""
    kind = draw.choices([*_KINDS], [weight for weight, _ in _KINDS.values()])[0]
    method, path, sent, good = _KINDS[kind][1](draw)
    leaves, slow = draw.random() < 1 / 3, draw.random() < 0.05
    try:
        async with asyncio.timeout(draw.uniform(0.001, 0.2) if leaves else None):
            async with session.request(method, path, **sent) as answer:
                async for _ in answer.content.iter_any():
                    if slow:
                        await asyncio.sleep(0.05)
                # 429: the queue is full; 507 and other server errors are faults.
                if answer.status not in good | {429}:
                    return kind, f"{kind}: status {answer.status}"
    except TimeoutError:
        return f"{kind}, left", ""
    except aiohttp.ClientError as error:
        # A body that is too large is refused before it is read.
        return kind, "" if kind == "large" else f"{kind}: {error!r}"
    return kind, ""


def _text(draw: random.Random, most: int = 60) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(1, most)))


def _completion(draw: random.Random) -> Any:
    body = {
        "prompt": _text(draw),
        "max_tokens": draw.randint(1, 12),
        "stream": draw.random() < 0.5,
        "n": draw.choice([1, 1, 1, 2]),
        "temperature": draw.choice([0, 1]),
        "ignore_eos": True,
    }
    return "POST", "/v1/completions", {"json": body}, {200}


def _chat(draw: random.Random) -> Any:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": _text(draw, 20)}],
        "max_tokens": draw.randint(1, 12),
        "stream": draw.random() < 0.5,
    }
    if draw.random() < 0.3:
        body["documents"] = {"search": {"top_k": 2}}
        # No document may be stored yet, or one may be removed during the request.
        return "POST", "/v1/chat/completions", {"json": body}, {200, 400}
    return "POST", "/v1/chat/completions", {"json": body}, {200}


def _document(draw: random.Random) -> Any:
    path = f"/v1/documents/d{draw.randrange(_DOCUMENTS)}"
    kind = draw.random()
    if kind < 0.4:
        # 409: another client removed it while it was encoded.
        return "PUT", path, {"data": _text(draw, 60).encode()}, {201, 409}
    if kind < 0.6:
        return "DELETE", path, {}, {200, 404}
    return "GET", draw.choice([path, "/v1/documents", "/v1/documents?query=lamp"]), {}, {200, 404}


def _wrong(draw: random.Random) -> Any:
    path = draw.choice(["/v1/completions", "/v1/chat/completions"])
    values = [-1, 10**30, 1e308, "x", None, [], {}, True, -(2**63), 2**64]
    field = draw.choice("max_tokens n temperature top_p top_k seed stop logprobs".split())
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    body[field] = draw.choice(values)
    # Some of them happen to be valid.
    return "POST", path, {"json": body}, _REFUSED | {200}


def _malformed(draw: random.Random) -> Any:
    path = draw.choice(["/v1/completions", "/v1/chat/completions", "/tokenize"])
    raw = draw.choice([b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": "\xc3("}', b"NaN"])
    return "POST", path, {"data": raw, "headers": {"content-type": "application/json"}}, _REFUSED


def _large(_: random.Random) -> Any:
    body = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    headers = {"content-type": "application/json"}
    return "POST", "/v1/completions", {"data": body, "headers": headers}, {413}


#: Weight, and a function that makes a request: method, path, content, expected statuses.
_KINDS: dict[str, tuple[float, Any]] = {
    "completion": (50, _completion),
    "chat": (20, _chat),
    "document": (15, _document),
    "wrong": (8, _wrong),
    "malformed": (6, _malformed),
    "large": (0.2, _large),
}


async def idle(session: Any) -> list[str]:
    """Waits until nothing runs; returns what the server still holds."""
    held = {}
    for _ in range(600):
        async with session.get("/metrics") as answer:
            text = await answer.text()
        found = dict(re.findall(r"^(keyhole_\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE))
        held = {
            "running": float(found["keyhole_completions_running"]),
            "waiting": float(found["keyhole_requests_waiting"]),
            # Pages of the prefix cache stay until requests need them.
            "pages": float(found["keyhole_pages"])
            - float(found["keyhole_pages_free"])
            - float(found["keyhole_pages_cached"]),
            "documents on their way": sum(
                float(found.get(f'keyhole_documents{{status="{status}"}}', 0))
                for status in ("queued", "encoding")
            ),
        }
        if not any(held.values()):
            return []
        await asyncio.sleep(0.1)
    return [f"the idle server holds {held}"]


def usage(process: int) -> dict[str, Any]:
    """Resident memory and open files of a process and its children."""
    size = files = 0
    for one in (process, *children(process)):
        place = Path("/proc") / str(one)
        size += int((place / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        files += len(list((place / "fd").iterdir()))
    return {"resident_bytes": size, "files": files}


def children(process: int) -> list[int]:
    """The processes that a process has started."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


if __name__ == "__main__":
    main()
