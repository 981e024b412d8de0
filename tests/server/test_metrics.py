"""What /metrics says, and that the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from keyhole import LLM
from keyhole.server.metrics import BatchedHistogram
from tests.server.conftest import make_llm, serving

ROOT = Path(__file__).parents[2]
#: Names in an expression that are PromQL's own.
_FUNCTIONS = {"sum", "rate", "increase", "histogram_quantile", "by", "le", "or", "vector"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """One that no other test has asked, as its prefix cache is counted."""
    return make_llm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def samples(llm: LLM) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name and labels, after a completion, its repetition, a document and an error."""
    with serving(llm) as address:
        body = {"prompt": "x" * 40, "max_tokens": 5, "ignore_eos": True}
        for _ in range(2):
            assert httpx2.post(f"{address}/v1/completions", json=body).status_code == 200
        assert httpx2.put(f"{address}/v1/documents/m", content=b"a text").status_code == 201
        asked = {"messages": [{"role": "user", "content": "?"}], "documents": ["m"]}
        answer = httpx2.post(f"{address}/v1/chat/completions", json=asked | {"max_tokens": 2})
        assert answer.status_code == 200
        assert httpx2.get(f"{address}/nowhere/7").status_code == 404
        text = httpx2.get(f"{address}/metrics").text
        assert httpx2.delete(f"{address}/v1/documents/m").status_code == 200
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_everything_that_is_promised_is_counted(
    samples: dict[str, dict[tuple[str, ...], float]], llm: LLM
) -> None:
    assert samples["keyhole_requests_total"]["/v1/completions", "200"] == 2
    assert samples["keyhole_requests_total"]["other", "404"] == 1
    assert samples["keyhole_errors_total"]["not_found_error",] == 1
    assert samples["keyhole_completions_running"][()] == 0
    assert samples["keyhole_requests_waiting"][()] == 0
    assert samples["keyhole_generated_tokens_total"][()] == 12
    assert samples["keyhole_prompt_tokens_total"][()] > 2 * 41
    # 41 tokens have two whole pages.
    assert samples["keyhole_cached_prompt_tokens_total"][()] == 32
    assert samples["keyhole_prefix_hits_total"][()] == 1
    assert samples["keyhole_read_bytes_total"]["memory",] > 0
    assert samples["keyhole_read_bytes_total"]["store",] > 0
    assert samples["keyhole_read_bytes_total"]["offload",] == 0
    assert samples["keyhole_pages"][()] == llm.engine.max_pages
    assert 0 < samples["keyhole_pages_free"][()] <= llm.engine.max_pages
    assert samples["keyhole_pages_cached"][()] > 0
    assert samples["keyhole_offloaded_layers"][()] == 0
    assert samples["keyhole_documents"]["ready",] == 1
    assert samples["keyhole_documents"]["failed",] == 0
    assert samples["keyhole_document_bytes"][()] > 0
    for name in ("queue_seconds", "first_token_seconds", "keys_read_share"):
        assert samples[f"keyhole_{name}_count"][()] == 3
    # One less than tokens, of each completion.
    assert samples["keyhole_inter_token_seconds_count"][()] == 4 + 4 + 1


def test_a_batched_histogram_counts_as_prometheus_does() -> None:
    histogram = BatchedHistogram("h", "text", (1.0, 2.0))
    histogram.observe_all([0.5, 1.0, 1.5, 9.0])
    (family,) = histogram.collect()
    values = {s.labels.get("le", s.name): s.value for s in family.samples}
    assert values == {"1.0": 2, "2.0": 3, "+Inf": 4, "h_count": 4, "h_sum": 12.0}


def expressions() -> list[str]:
    board = json.loads((ROOT / "deploy/grafana.json").read_text(encoding="utf-8"))
    return [t["expr"] for panel in board["panels"] for t in panel.get("targets", [])]


def test_every_metric_of_the_dashboard_is_there(
    samples: dict[str, dict[tuple[str, ...], float]],
) -> None:
    asked: set[str] = set()
    for expression in expressions():
        bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"|by \([^)]*\)", "", expression)
        asked |= {name for name in re.findall(r"[a-z_]{2,}", bare) if name not in _FUNCTIONS}
    assert asked
    assert asked <= samples.keys()


def test_the_dashboard_shows_every_metric(
    samples: dict[str, dict[tuple[str, ...], float]],
) -> None:
    text = "\n".join(expressions())
    kinds = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in samples}
    assert [name for name in sorted(kinds) if name not in text] == []


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    board = json.loads((ROOT / "deploy/grafana.json").read_text(encoding="utf-8"))
    cells = [
        (x, y)
        for panel in board["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
