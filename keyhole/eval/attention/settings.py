"""What the suite `attention` is told. No torch here, as command-line flags derive from it."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.config import require, setting
from keyhole.eval.settings import Budgets, EvalSettings

#: Texts that the random twin reads, of those that the model reads: what it shows varies little.
TWIN_TEXTS = 4

#: Flags of `keyhole eval` that the suite takes.
TAKEN = (
    "text",
    "lengths",
    "limit",
    "policies",
    "budgets",
    "terms",
    "dense_layers",
    "sinks",
    "window",
    "batch",
    "prompt_memory",
)


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(EvalSettings):
    """The settings of an evaluation with the defaults of this suite; policies "": all of them."""

    limit: int = setting(8, "texts in a cell")
    policies: str = setting("", "methods that are measured; none: all that have a budget")
    budgets: Budgets = setting(  # noqa: RUF009
        ("1/8", "1/16"), "tokens that a step may read, or shares of the length in whole pages"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        right = "given, equal or published: methods are tuned by right answers, which no text has"
        require(self.terms != "tuned", "terms", self.terms, right)

    @property
    def files(self) -> list[str]:
        """The files of `text`."""
        return [part.strip() for part in (self.text or "").split(",") if part.strip()]
