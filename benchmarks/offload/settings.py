"""Settings of the benchmark of offloaded layers. No torch: the command's flags derive from this."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.bench.settings import DEVICES, PAGE_SIZE, SHAPES, Names, specs
from keyhole.config import is_count, require, require_counts, require_known, setting

BUNDLED = ("tiny", "tiny-hops")


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """The benchmark of loading from offloaded layers, on the bundled model."""

    model: str = setting("tiny", "bundled model, one of tiny and tiny-hops")
    budgets: tuple[int, ...] = setting(
        (64, 128, 256, 512, 1024), "token budgets in ascending order"
    )
    policies: Names = setting(  # noqa: RUF009
        ("spe_context", "delta"),
        "policies that select, with settings as in delta:recent_pages=4; one whose name sets a "
        "token_budget is measured only at this budget",
    )
    words: int = setting(2048, "words of a derivation, including its answer")
    items: int = setting(2, "derivations")
    folder: str | None = setting(
        None,
        "folder of the offloaded layers; None: the temporary folder; a GPU offloads to RAM",
    )
    repeat: int = setting(100, "number of timed steps at the end of each derivation")
    context: int | None = setting(
        None, "also measure a model with random weights at this many tokens; None: do not"
    )
    shape: str = setting("llama-3.2-1b", "shape of that model")
    memory: int | None = setting(
        None,
        "bytes of memory for that model and its cache; None: offload all layers that can be",
    )
    trace: str | None = setting(
        None,
        "also write a Chrome trace of some steps to this file; of that model if it is measured",
    )
    device: str = setting("auto", DEVICES)

    def __post_init__(self) -> None:
        counts = all(is_count(budget) for budget in self.budgets) and bool(self.budgets)
        good = counts and sorted(set(self.budgets)) == list(self.budgets)
        require_known("model", self.model, BUNDLED)
        require(good, "budgets", self.budgets, "numbers of tokens in ascending order")
        object.__setattr__(self, "policies", specs(self.policies))
        require(bool(self.policies), "policies", self.policies, "at least one")
        require_counts(self, "words", least=96)  # see keyhole.eval.tiny_language.tasks.make
        require_counts(self, "items", "repeat")
        pages = self.context is None or (is_count(self.context) and self.context % PAGE_SIZE == 0)
        require(pages, "context", self.context, f"a multiple of {PAGE_SIZE}")
        fits = self.memory is None or self.context is not None
        require(fits, "memory", self.memory, "left out without context: it is for that model")
        require_known("shape", self.shape, SHAPES)
