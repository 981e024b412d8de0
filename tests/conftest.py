"""What holds for every test: quiet threads, no network, reproducible examples, no GPU needed."""

import gc
import os
from collections.abc import Generator
from zlib import crc32

os.environ.update(OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
# Without a network no certificate is checked, but each client of HTTP would read all, in 30 ms.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull

import pytest

try:
    from hypothesis import settings
except ImportError:  # the tests in gpu/ run where nothing can be installed, and use none
    settings = None

if settings is not None:
    from tests.effort import MOST_EXAMPLES

    common = {"deadline": None, "max_examples": MOST_EXAMPLES}
    settings.register_profile("here", **common)
    settings.register_profile("in-ci", **common, derandomize=True)
    settings.load_profile("in-ci" if os.environ.get("CI") else "here")


def pytest_configure(config: pytest.Config) -> None:
    """Tensors here are small: one thread; the kernels' own tests use two.

    A process that only hands out tests to others starts them two seconds sooner without torch.
    """
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow all but one in n of the cases of a test marked `one_in(n)`.

    Where parameters cross, the cases that stay are on a diagonal: the places of their values in the
    sorted lists add up to r, modulo n. So each value of a list is there if another list has n
    values or more. r follows from the test's name: of the same values, such as all policies, other
    tests keep other ones. If n is above the length of every list, a part of a diagonal stays.
    """
    tests: dict[tuple[object, ...], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_in") is not None:
            tests.setdefault((item.path, item.originalname), []).append(item)
    for (_, name), cases in tests.items():
        n = cases[0].get_closest_marker("one_in").args[0]
        lists = [sorted(set(ids)) for ids in zip(*(c.callspec._idlist for c in cases), strict=True)]
        modulus = min(n, max(map(len, lists)))
        diagonals: dict[int, list[pytest.Item]] = {}
        for case in cases:
            if case.get_closest_marker("slow") is None:
                places = map(list.index, lists, case.callspec._idlist)
                diagonals.setdefault(sum(places) % modulus, []).append(case)
        if diagonals:
            chosen = sorted(diagonals)[crc32(str(name).encode()) % len(diagonals)]
            stay = diagonals[chosen][:: round(n / modulus)]
            for case in cases:
                if case not in stay:
                    case.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage is looked for while modules are imported: it took a sixth of that time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What the tests and their libraries hold, a million objects, is no garbage and not visited.

    A collection of garbage takes milliseconds instead of a second: there are hundreds in a run.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries complain about what is left when Python ends."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
