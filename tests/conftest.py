"""What holds for every test: quiet threads, no network, reproducible examples, no GPU needed."""

import gc
import os
from collections.abc import Generator

os.environ.update(OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import pytest
import torch

try:
    from hypothesis import settings
except ImportError:  # the tests in gpu/ run where nothing can be installed, and use none
    settings = None

#: Tensors here are small; the kernels' own tests use two threads.
torch.set_num_threads(1)

if settings is not None:
    settings.register_profile("here", deadline=None)
    settings.register_profile("in-ci", deadline=None, derandomize=True)
    settings.load_profile("in-ci" if os.environ.get("CI") else "here")


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow all but one in n of the cases of a test marked `one_in(n)`.

    Where parameters cross, the cases that stay are diagonals: those whose places in the sorted
    lists of values add up to a multiple of n. So each value of a list is there if another list has
    n values or more.
    """
    cases: dict[tuple[object, ...], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_in") is not None:
            cases.setdefault((item.path, item.originalname), []).append(item)
    for same in cases.values():
        lists = [sorted(set(ids)) for ids in zip(*(i.callspec._idlist for i in same), strict=True)]
        for item in same:
            places = map(list.index, lists, item.callspec._idlist)
            if sum(places) % item.get_closest_marker("one_in").args[0]:
                item.add_marker("slow")


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
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
