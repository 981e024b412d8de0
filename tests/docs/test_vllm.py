"""What vllm.md says of speed is what the last stored line says."""

from __future__ import annotations

from benchmarks.results_page.text import between
from benchmarks.serving import vllm_page
from benchmarks.speed_pages import stored


def test_the_section_on_speed_is_the_stored_line() -> None:
    text = vllm_page.PAGE.read_text()
    written = between(text, vllm_page.BEGIN, vllm_page.END, vllm_page.section(stored("vllm")[-1]))
    assert written == text, "run `python -m benchmarks.serving.vllm_page`"


def test_every_measured_policy_has_a_target_that_its_ratio_decides() -> None:
    line = stored("vllm")[-1]
    found = [(result, one) for result in line["results"] for one in result["policies"]]
    assert {(result["kind"], result["batch"]) for result, _ in found} >= {("budget", 1)}
    for (result, one), bar in zip(found, line["bars"], strict=True):
        least = 0.95 if result["kind"] == "covered" else 1.0
        assert bar["value"] == one["ratio"]
        assert bar["met"] == (one["ratio"] >= least)
        read = one["attended_fraction"]
        assert read == 1 if result["kind"] == "covered" else 0 < read < 0.5
