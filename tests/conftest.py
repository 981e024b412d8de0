"""What holds for every test: quiet threads, no network, reproducible examples, no GPU needed."""

import os

os.environ.update(OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(2)

settings.register_profile("here", deadline=None)
settings.register_profile("in-ci", deadline=None, derandomize=True)
settings.load_profile("in-ci" if os.environ.get("CI") else "here")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
