"""What a question keeps, block by block, and pictures of it that stay readable."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.documents.record import LayerStatistics
from keyhole.engine.documents.filling import Reused
from keyhole.errors import ConfigError
from keyhole.eval.report import document_charts
from keyhole.eval.report.document_charts import cells, document_chart, kept_chart, ranks


def made(lengths: list[int], layers: int = 3, *, seed: int = 0, shares: bool = True) -> Reused:
    """Random tokens kept, and some of them computed again."""
    rng = torch.Generator().manual_seed(seed)
    kept = torch.rand(layers, sum(lengths), generator=rng) < 0.5
    written = kept & (torch.rand(layers, sum(lengths), generator=rng) < 0.3)
    return Reused(
        documents=[f"folder/document {number}" for number in range(len(lengths))],
        digests=["" for _ in lengths],
        lengths=lengths,
        shares=(0.25,) * len(lengths) if shares else None,
        sequence_ratio=0.5,
        held_ratio=0.6,
        recompute_ratio=0.1,
        tokens_not_computed=1,
        bytes_read=1,
        kept=kept,
        recomputed=written,
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 9))
def test_cells_count_tokens_of_blocks(lengths: list[int], block_size: int) -> None:
    reused = made(lengths)
    found = cells(reused, lengths, block_size)
    assert [document.name for document in found] == reused.documents
    start = 0
    for document, length in zip(found, lengths, strict=True):
        for number, first in enumerate(range(0, length, block_size)):
            last = min(length, first + block_size)
            for layer in range(3):
                for shares, tokens in (
                    (document.kept, reused.kept),
                    (document.recomputed, reused.recomputed),
                ):
                    own = tokens[layer, start + first : start + last].tolist()
                    assert math.isclose(shares[layer, number], sum(own) / len(own))
        assert document.kept.shape == (3, -(-length // block_size))
        start += length


@pytest.mark.slow
@given(st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_every_block_has_its_place(sizes: list[int]) -> None:
    lines, room = document_charts._lines(sizes)
    seen: list[tuple[int, int]] = []
    for line in lines:
        end = -1.0
        for piece in line:
            assert piece.place > end or not end > 0
            end = piece.place + piece.size
            assert end <= room + 1e-6
            seen += [(piece.document, block) for block in range(piece.first, piece.last)]
    assert seen == [(i, block) for i, size in enumerate(sizes) for block in range(size)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "lengths",
    [[1], [70, 30, 5], [64] * 200, [300] * 16, [40_000], [2000, 3000, 100]],
    ids=["one token", "short", "200", "16", "long", "mixed"],
)
@pytest.mark.parametrize("shares", [True, False])
def test_any_prompt_is_a_picture(lengths: list[int], shares: bool, tmp_path: Path) -> None:
    path = tmp_path / "kept.png"
    kept_chart(made(lengths, shares=shares), lengths, 64, path, title="Which?", subtitle="sam_kv")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert width == 1440
    assert 200 < height < 4000


def colors(path: Path) -> dict[str, int]:
    """How many pixels have each color of the legend."""
    from matplotlib import image

    pixels = (image.imread(path)[..., :3] * 255).round().astype(int)
    wanted = {name: getattr(document_charts, name) for name in ("_KEPT", "_WRITTEN", "_DROPPED")}
    return {
        name: int((pixels == [int(value[i : i + 2], 16) for i in (1, 3, 5)]).all(-1).sum())
        for name, value in wanted.items()
    }


def test_cells_have_the_colors_of_their_tokens(tmp_path: Path) -> None:
    """The area of each color is its share of the blocks; the legend adds the same for each."""
    reused = made([6400], layers=4)
    reused.kept[:] = False
    reused.kept[:, :1600] = True
    reused.recomputed[:] = False
    reused.recomputed[:2, :1600] = True
    kept_chart(reused, [6400], 64, tmp_path / "x.png", title="Which?")
    found = colors(tmp_path / "x.png")
    assert np.isclose(found["_KEPT"] / found["_WRITTEN"], 1, atol=0.1)
    assert np.isclose(found["_DROPPED"] / found["_KEPT"], 6, atol=0.6)
    reused.kept[:] = True
    reused.recomputed[:] = False
    kept_chart(reused, [6400], 64, tmp_path / "x.png", title="Which?")
    assert colors(tmp_path / "x.png")["_WRITTEN"] == 0
    assert colors(tmp_path / "x.png")["_DROPPED"] == 0


def test_names_are_cut_or_counted() -> None:
    def names(documents: list[str], sizes: list[int]) -> list[str]:
        return document_charts._names(documents, *document_charts._lines(sizes))

    assert names(["a/x.md", "a/y.md"], [20, 20]) == ["x.md", "y.md"]
    assert names(["a/x.md", "b/x.md"], [20, 20]) == ["a/x.md", "b/x.md"]
    long = [f"chapter-{number:03}.markdown" for number in range(12)]
    assert all(name in long for name in names(long[:4], [25] * 4))
    cut = names(long, [9] * 12)
    assert all(len(name) <= 11 and name.endswith("arkdown") for name in cut) or cut == [
        str(number) for number in range(1, 13)
    ]
    assert names(long, [1] * 12) == [str(number) for number in range(1, 13)]
    assert names(["x", "x"], [20, 20]) == ["x", "x"]  # one document that stands twice


def test_an_unwritable_place_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write the picture"):
        kept_chart(made([5]), [5], 4, tmp_path / "no" / "x.png", title="Which?")
    with pytest.raises(ConfigError, match="cannot write the picture"):
        document_chart(statistics(3, 5), tmp_path / "no" / "x.png", title="name")


def statistics(layers: int, blocks: int) -> list[LayerStatistics]:
    """Layers of a document; only alpha and received are drawn."""
    none = torch.zeros(0)
    return [
        LayerStatistics(
            block_keys=none,
            local_queries=none,
            representatives=none,
            representative_keys=none,
            alpha=torch.rand(blocks),
            received=torch.rand(blocks),
        )
        for _ in range(layers)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "blocks"), [(1, 1), (6, 40), (32, 2000)])
def test_any_document_is_a_picture(layers: int, blocks: int, tmp_path: Path) -> None:
    made_ = statistics(layers, blocks)
    made_[0].alpha[-1] = torch.inf
    if blocks > 11:
        made_[0].alpha[3] = -1e6  # an outlier
    document_chart(made_, tmp_path / "x.png", title="handbook", subtitle="40 tokens")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_ranks_go_from_0_to_1_and_leave_out_what_is_infinite() -> None:
    values = torch.tensor([[3.0, 1.0, torch.inf, 2.0], [0.0, 0.0, 5.0, -1.0]])
    found = ranks(values)
    assert found[0].tolist()[:2] + found[0].tolist()[3:] == [1.0, 0.0, 0.5]
    assert found[0, 2].isnan()
    assert torch.allclose(found[1], torch.tensor([1 / 3, 2 / 3, 1.0, 0.0]))
    assert ranks(torch.tensor([[torch.inf]])).isnan().all()
