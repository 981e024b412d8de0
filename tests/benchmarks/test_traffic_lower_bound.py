"""What arithmetic says of a bar is counted from shapes, as a run counts it from a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.paper import throughput
from benchmarks.paper.page import section
from benchmarks.paper.settings import HEADLINES, ThroughputSettings
from benchmarks.paper.throughput import num_weights, traffic_bound
from keyhole.bench.model import RESERVE_BYTES, make_weights
from keyhole.bench.settings import DecodeSettings


def small() -> ThroughputSettings:
    decode = DecodeSettings(
        shape="smoke", device="cpu", dtype="float32", systems=("full",), token_budget=64
    )
    return ThroughputSettings(
        prompt=64, answer=160, memory=RESERVE_BYTES + (4 << 20), decode=decode
    )


def test_weights_and_requests_are_those_of_a_run() -> None:
    asked = small()
    model = make_weights(replace(asked.decode, contexts=(64,))).keyhole
    assert num_weights("smoke") == sum(x.numel() for x in model.network.parameters())
    room = asked.memory - RESERVE_BYTES - 4 * num_weights("smoke")
    most = throughput.most_requests("full", model, asked, room)
    # A run keeps some pages for each request in reserve.
    assert 1 <= most <= traffic_bound(asked).requests <= most + most // 5 + 1


def test_the_gain_is_a_ratio_of_bytes() -> None:
    asked = small()
    found = traffic_bound(asked)
    token, weights = 2 * 4 * 2 * 16 * 4, 4 * num_weights("smoke")  # a tied embedding is read
    dense = weights + found.requests * 144 * token
    sparse = weights + found.requests * (64 * token + 144 * 2 * 16 * 4)
    assert found.gain == pytest.approx(dense / sparse)


def test_these_requests_fit_in_the_papers_settings() -> None:
    """As `throughput.most_requests` counted them from a model of that shape."""
    found = {
        name: traffic_bound(one.settings)
        for name, one in HEADLINES.items()
        if isinstance(one.settings, ThroughputSettings)
    }
    assert [one.requests for one in found.values()] == [13, 13, 1, 1]
    assert [round(one.gain, 2) for one in found.values()] == [2.44, 3.74, 1.14, 1.27]


def test_the_page_names_unreachable_targets() -> None:
    text = "\n".join(section([]))
    lines = [line for line in text.splitlines() if line.startswith("- ") and "bytes" in line]
    assert len(lines) == 4
    assert [("out of reach" in line) for line in lines] == [False, False, True, True]
    assert "not those of its long answers" in text.replace("\n", " ")
