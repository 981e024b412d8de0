"""Documents say what the stored lines say; lines of the first versions are understood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import speed_pages
from benchmarks.paper.settings import HEADLINES
from benchmarks.speed_pages import offload as offload_page
from benchmarks.speed_pages import plot, speculation, tables
from keyhole.bench.settings import ALL_BASELINES

ROOT = Path(__file__).parents[2]


def test_results_and_pictures_are_those_of_the_stored_lines() -> None:
    lines = speed_pages.stored("decode")
    offload = speed_pages.stored("offload")
    text = (ROOT / "docs" / speed_pages.PAGE).read_text()
    assert speed_pages.current() == text, "run `python -m benchmarks.speed_pages`"
    shown = [*speed_pages.pictures(lines).items()]
    newest = {line["model"]: line for line in offload}
    shown += [(offload_page.picture_name(line), line) for line in newest.values()]
    for name, line in shown:
        picture = (ROOT / "docs/images" / name).read_bytes()
        assert line["date"].encode() in picture, "run `python -m benchmarks.speed_pages`"


def decode_line(**more: Any) -> dict[str, Any]:
    """A line as the first version of the benchmark wrote it, and what is given."""
    results = [
        {
            "context": context,
            "system": system,
            "step_ms": ms,
            "ratio_to_peer": ms / 100,
            "attended_fraction": 1.0,
            "bandwidth_share": 0.5,
        }
        for context, system, ms in (
            (2048, "transformers_sdpa", 100.0),
            (2048, "full", 50.0),
            (8192, "full", 60.0),
        )
    ]
    return {
        "benchmark": "decode",
        "date": "2026-01-02T03:04:05+00:00",
        "command": "python -m benchmarks.decode --note 'some words' --batch 1",
        "commit": "abc",
        "note": "some words",
        "machine": {"cpu": "A", "cores": 2, "memory_gib": 8.0, "device": "cpu"},
        "versions": {"torch": "2", "transformers": "5"},
        "settings": {"batch": 1, "repeat": 3, "shape": "smoke", "dtype": "bfloat16"},
        "results": results,
    } | more


def test_a_draft_stands_beside_full_attention_and_only_the_newest_line_counts() -> None:
    def drafted(date: str, *accepted: float, **settings: Any) -> dict[str, Any]:
        of = {"task": "walk", "length": 2048, "items": 4}
        plain = {"system": "full", "accepted_lengths": [1.0] * 4, "right": 4}
        fast = {"system": "full+eagle3", "accepted_lengths": accepted, "right": 3}
        return {
            "date": f"{date}T03:04:05",
            "commit": "abc",
            "command": "python -m benchmarks.serving.bundled_draft",
            "machine": {
                "cpu": "A",
                "cores": 2,
                "memory_gib": 8.0,
                "device": "cpu",
                "load_average": 0.5,
            },
            "versions": {"torch": "2", "transformers": "5"},
            "note": "",
            "settings": {
                "model": "folder/small",
                "systems": ["full", "full+eagle3"],
                "num_draft_tokens": 4,
                "items": 4,
                "written": 128,
            }
            | settings,
            "results": [
                of | plain | {"tokens_per_second": 100.0},
                of | fast | {"tokens_per_second": 150.0},
            ],
        }

    lines = [
        drafted("2026-01-01", 2.0),
        drafted("2026-01-02", 2.0, 3.0, 3.0, 4.0),
        drafted("2026-01-03", 4.0, systems=["full+eagle3"]),
        drafted("2026-01-04", 4.0, shares=[4, 8]),
    ]
    text = "\n".join(speculation.own_drafts(lines))
    # Student's interval of 2, 3, 3 and 4: 3.182 times .816 / 2.
    assert "| `walk` | 2,048 | 3.00 ± 1.30 (1.50), 3 of 4 right |" in text
    assert "2026-01-02" in text
    assert "2026-01-01" not in text
    assert speculation.own_drafts(lines[2:]) == []


def with_batch(batch: int, **more: Any) -> dict[str, Any]:
    line = decode_line(**more)
    return line | {"settings": line["settings"] | {"batch": batch}}


def test_a_table_leaves_out_what_was_not_measured() -> None:
    assert tables.times(decode_line()).splitlines() == [
        "| tokens | `transformers_sdpa` | `full` |",
        "|---|---|---|",
        "| 2,048 | 100 (50%) | 50 (50%) |",
        "| 8,192 |  | 60 (50%) |",
    ]
    assert tables.memory(decode_line()) == []


def test_a_ratio_without_its_peer_is_no_number() -> None:
    line = decode_line()
    line["results"][2]["ratio_to_peer"] = None
    assert tables.ratios(line).splitlines()[-1] == "| 8,192 | – (100%) |"


def test_memory_is_shown_with_what_was_skipped() -> None:
    line = decode_line(skipped=[])
    for result in line["results"]:
        result |= {"peak_bytes": 3 << 30, "stated_bytes": 2 << 30}
    line["skipped"] = [
        {"context": 8192, "system": None, "need_bytes": 5 << 30, "free_bytes": 4 << 30}
    ]
    *_, table, skipped = tables.memory(line)
    assert table.splitlines()[2] == "| 2,048 | 1.500 (3.00) | 1.500 (3.00) |"
    assert skipped == "- `everything` at 8,192 tokens needs 5.0 GiB; 4.0 were free."


def test_the_command_is_shown_without_its_note() -> None:
    assert tables.about(decode_line()).endswith(
        "`python -m benchmarks.decode --batch 1`. Note: some words."
    )


def test_the_last_line_of_each_device_and_batch_counts() -> None:
    other = {"cpu": "A", "cores": 2, "memory_gib": 8.0, "device": "NVIDIA H200"}
    lines = [
        decode_line(commit="old"),
        decode_line(commit="new"),
        with_batch(8, commit="batched"),
        decode_line(commit="gpu", machine=other),
    ]
    assert {name: line["commit"] for name, line in speed_pages.pictures(lines).items()} == {
        "decode-cpu.png": "new",
        "decode-cpu-batch-8.png": "batched",
        "decode-nvidia-h200.png": "gpu",
    }
    page = speed_pages.page(lines, [])
    assert page.count("## Decode step") == 3
    assert "commit old" not in page
    readme = speed_pages.render(lines)  # a CPU's table, of the smallest batch
    assert "commit new" in readme
    assert "commit gpu" not in readme
    assert "batched" not in readme


def test_kernels_have_a_row_for_each_case() -> None:
    def result(system: str, ms: float, share: float | None) -> dict[str, Any]:
        usual = {"op": "attend", "about": "all of 32 tokens", "gflop_per_s": 7.0}
        return {**usual, "system": system, "ms": ms, "bandwidth_share": share}

    line = decode_line(benchmark="kernels", read_bytes_per_s=4e10)
    line["settings"]["paths"] = ["avx2", "reference"]
    line["results"] = [
        result("avx2", 0.25, 0.5),
        result("reference", 2.0, None),
        result("torch sdpa", 9.0, 0.1),
    ]
    line["bars"] = [{"bar": "share", "value": 0.5, "wanted": ">= 0.6", "met": False}]
    page = speed_pages.page([], [line])
    row = "| `attend` | all of 32 tokens | 0.25 (50%) | 2 (7 GFLOP/s) | torch sdpa: 9 |"
    assert row in page.splitlines()
    assert "- share: 0.50, target >= 0.6 (missed)" in page.splitlines()
    assert "40.0 GB/s" in page


def packed_line(**more: Any) -> dict[str, Any]:
    """A line with one product of packed weights."""
    times = {"avx2": 1.0, "avx2 linear": 3.0, "torch packed": 2.0, "torch linear": 4.0}
    results = [
        {
            "op": "packed_linear",
            "about": "1 x 64 by 64 x 128 in int4",
            "system": system,
            "ms": ms,
            "moved_bytes": 9 << 20,
            "ratio_to_peer": ms / 2,
            "sum_share": 1.2 / ms,
        }
        for system, ms in (times | {"torch sum": 1.2}).items()
    ]
    line = decode_line(benchmark="kernels", results=results, **more)
    line["settings"] |= {"paths": ["avx2"], "shape": "one"}
    return line


def test_packed_products_stand_beside_torchs_and_hide_no_other_line() -> None:
    """The newest line of a processor was its table, whatever it had measured."""
    kernels = decode_line(benchmark="kernels", read_bytes_per_s=4e10, commit="whole")
    kernels["settings"]["paths"] = []
    kernels["results"] = []
    page = speed_pages.page([], [kernels, packed_line(commit="old"), packed_line(commit="new")])
    row = "| 1 x 64 by 64 x 128 in int4 | 9.0 MiB | 1 (120%) | 2 (60%) | 0.50 | 3 (40%) | 4 (30%) |"
    assert row in page.splitlines()
    assert page.count("## Kernels on A\n") == page.count("## Products of packed weights") == 1
    assert "commit whole" in page
    assert "commit new" in page
    assert "commit old" not in page


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_a_share_above_the_whole_bandwidth_is_explained(share: float) -> None:
    line = decode_line(benchmark="kernels", read_bytes_per_s=4e10)
    line["settings"]["paths"] = ["avx2"]
    line["results"] = [
        {"op": "linear", "about": "one", "system": "avx2", "ms": 1.0, "bandwidth_share": share}
    ]
    assert ("can exceed 100 %" in speed_pages.page([], [line])) == (share > 1)


def test_a_line_with_llama_cpp_has_its_targets_and_version() -> None:
    line = decode_line(llama_cpp={"version": "0.3.36"})
    line["results"].append(line["results"][0] | {"system": "llama_cpp"})
    line["bars"] = [{"bar": "ratio", "value": 1.5, "wanted": ">= 1.3", "met": True}]
    page = speed_pages.page([line], [])
    assert "- ratio: 1.50, target >= 1.3\n" in page
    assert "transformers 5, llama-cpp-python 0.3.36;" in page
    assert "| tokens | `transformers_sdpa` | `full` | `llama_cpp` |" in page


@pytest.mark.slow
def test_a_picture_is_written_with_the_date_of_its_measurement(tmp_path: Path) -> None:
    line = decode_line()
    line["results"].append(line["results"][0] | {"system": "somebody_else"})
    line["results"].append(line["results"][0] | {"system": list(ALL_BASELINES)[-1]})
    plot.step_times(line, tmp_path / "images" / "a.png")
    picture = (tmp_path / "images" / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert line["date"].encode() in picture


def headline_line(**more: Any) -> dict[str, Any]:
    gpu = {"cpu": "A", "cores": 2, "memory_gib": 8.0, "device": "NVIDIA H200"}
    bar = {"bar": "delta: tokens/s by those of full", "value": 1.5, "wanted": ">= 2.0"}
    line = decode_line(machine=gpu, headline="delta_figure_4", small=False, unit="tokens/s")
    return line | {"speeds": {"delta": 3000.0}, "bars": [bar | {"met": False}]} | more


def test_headline_settings_that_no_line_tells_of_are_named_as_unmeasured() -> None:
    page = speed_pages.page([], [], headlines=[])
    rows = [row for row in page.splitlines() if row.startswith("|")][2:]
    assert len(rows) == sum(len(one.targets) for one in HEADLINES.values())
    assert all(row.endswith("| unmeasured |") for row in rows)
    assert f"Settings: {len(HEADLINES)}; unmeasured: {len(HEADLINES)}." in page
    # The same in small, or on a CPU, says nothing of it.
    cpu = {"cpu": "A", "cores": 2, "memory_gib": 8.0, "device": "cpu"}
    for other in (headline_line(small=True), headline_line(machine=cpu)):
        assert speed_pages.page([], [], headlines=[other]) == page


def test_a_headline_setting_has_the_last_line_of_a_gpu() -> None:
    lines = [headline_line(commit="old"), headline_line(commit="new")]
    page = speed_pages.page([], [], headlines=lines)
    assert f"Settings: {len(HEADLINES)}; unmeasured: {len(HEADLINES) - 1}." in page
    first, second = (row for row in page.splitlines() if row.startswith("|") and "`delta`" in row)
    assert first.startswith("| DELTA, figure 4: Qwen2.5-1.5B, batch 64")
    assert first.endswith("| 1.49, 35 to 28 ms | >= 2.0 | 1.50 (missed) |")
    assert second.endswith("| >= 1.5 | not measured |")
    assert "delta_figure_4, tokens/s: `delta` 3000.\nNVIDIA H200, torch 2" in page
    assert "commit new" in page
    assert "commit old" not in page


def test_kernels_of_a_gpu_are_shown_next_to_those_of_its_processor() -> None:
    def line(device: str) -> dict[str, Any]:
        found = decode_line(benchmark="kernels", read_bytes_per_s=4e10, results=[], bars=[])
        found["settings"]["paths"] = []
        return found | {"machine": found["machine"] | {"device": device}}

    page = speed_pages.page([], [line("cpu"), line("NVIDIA H200")])
    assert "## Kernels on A\n" in page
    assert "## Kernels on NVIDIA H200\n" in page


def test_without_stored_lines_there_is_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(speed_pages, "results", lambda: tmp_path)
    assert speed_pages.stored("decode") == []
    assert "##" not in speed_pages.page([], [])
    assert speed_pages.render([]) == ""
