"""One `LLM` in many threads: a bug of the first version, 20 of 24 calls of which raised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from keyhole import LLM, RequestError, SamplingParams
from keyhole.engine.scheduling.fairness import FairLock
from tests.checkpoints import make_model

THREADS = 8
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [3 + (7 * n + i) % 50 for i in range(5 + n)]} for n in range(24)]


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return LLM(make_model("llama", tmp_path, vocab_size=64), memory="4MiB", max_batch=4)


def in_threads(work: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(len(PROMPTS))))


@pytest.mark.slow
def test_calls_from_many_threads_give_what_each_gives_alone(llm: LLM) -> None:
    alone = [llm.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]
    assert in_threads(lambda n: llm.generate(PROMPTS[n], PARAMS).token_ids) == alone
    llm.engine.check_integrity()
    assert not llm.engine.has_work


@pytest.mark.slow
def test_streams_and_batches_of_many_threads_run_together(llm: LLM) -> None:
    alone = [llm.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]

    def work(n: int) -> list[int]:
        if n % 2:
            return [t for piece in llm.stream(PROMPTS[n], PARAMS) for t in piece.token_ids]
        return llm.generate([PROMPTS[n], PROMPTS[0]], PARAMS)[0].token_ids

    assert in_threads(work) == alone
    llm.engine.check_integrity()


@pytest.mark.slow
def test_requests_of_other_threads_join_the_batch(llm: LLM) -> None:
    """While one thread generates, another one's request is decoded in the same steps."""
    long = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)
    first = llm.stream(PROMPTS[0], long)
    next(first)
    waiting = threading.Event()
    together: list[int] = []

    def other() -> None:
        together.extend(len(llm.engine.scheduler.running) for _ in llm.stream(PROMPTS[1], PARAMS))
        waiting.set()

    thread = threading.Thread(target=other)
    thread.start()
    for _ in first:
        pass
    thread.join()
    assert waiting.is_set()
    assert max(together) == 2


@pytest.mark.slow
def test_an_error_of_one_thread_leaves_the_others_alone(llm: LLM) -> None:
    alone = [llm.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]

    def work(n: int) -> list[int]:
        if n % 3 == 0:
            with pytest.raises(RequestError, match="token id 99"):
                llm.generate({"prompt_token_ids": [99]}, PARAMS)
        return llm.generate(PROMPTS[n], PARAMS).token_ids

    assert in_threads(work) == alone


# The lock


def test_the_lock_is_taken_in_order() -> None:
    lock, order, ready = FairLock(), [], threading.Semaphore(0)

    def wait(n: int) -> None:
        ready.release()
        with lock:
            order.append(n)

    threads = []
    with lock, lock:  # again by the same thread
        for n in range(5):
            threads.append(threading.Thread(target=wait, args=(n,)))
            threads[-1].start()
            ready.acquire()
            while len(lock._waiting) <= n:
                pass
    for thread in threads:
        thread.join()
    assert order == list(range(5))


def test_who_stops_waiting_holds_nobody_up() -> None:
    lock = FairLock()
    with lock:
        pass
    turn = threading.Lock()
    turn.acquire()
    lock._waiting.append(turn)
    lock._leave(turn)  # as an interrupt does
    assert not lock._waiting
    done = threading.Event()

    def work() -> None:
        with lock:
            done.set()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done.is_set()


def test_what_is_deferred_runs_when_nobody_holds_the_lock() -> None:
    lock, done = FairLock(), []
    lock.defer(lambda: done.append("at once"))
    assert done == ["at once"]
    with lock:
        with lock:
            lock.defer(lambda: done.append("later"))
            lock.defer(lambda: lock.defer(lambda: done.append("by the deferred")))
        other = threading.Thread(target=lock.defer, args=(lambda: done.append("other thread"),))
        other.start()
        other.join()  # it does not wait for the lock
        assert done == ["at once"]
    assert done == ["at once", "later", "other thread", "by the deferred"]
    with lock._guard:  # garbage may be collected here, too
        lock.defer(lambda: done.append("last"))
    with lock:
        pass
    assert done[-1] == "last"


def test_a_deferred_action_that_fails_leaves_the_lock_free() -> None:
    lock = FairLock()
    with pytest.raises(ZeroDivisionError), lock:
        lock.defer(lambda: 1 / 0)
    assert lock._owner is None
