"""Settings of `keyhole eval` and its suites. No torch here: the flags derive from them."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.config import (
    KV_DTYPES,
    EngineConfig,
    is_count,
    require,
    require_counts,
    require_known,
    setting,
)

SETUPS = ("prompt", "question")
"""What is read densely before decoding: the whole prompt (A), or the context without the question,
which then goes through the policy token by token, as the answer does (B).
"""

FORCED = ("perplexity", "attention_recall")
"""Tasks that are scored by teacher forcing."""

TASKS = "passkey,qa_2,derive"
"""The default: one fact, two facts, and facts that the model itself has written."""

TERMS = {
    "given": "the settings in --policies, defaults otherwise",
    "equal": "the same --dense-layers, --sinks, --window and total budget for all",
    "published": "as in each paper or its authors' code",
    "tuned": "the best of --trials settings on held-out samples",
}
"""How methods are set up; lines and tables of different terms are never mixed."""

_FOR_TERMS = {
    "dense_layers": ("equal", "tuned"),
    "sinks": ("equal",),
    "window": ("equal",),
    "trials": ("tuned",),
    "tuning_limit": ("tuned",),
}

#: Names in one flag: a,b,c.
Names = tuple[str, ...]
#: The same for budgets, which may be numbers or shares.
Budgets = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """The cells of an evaluation and how they run. tasks, policies: names, optionally with
    settings.
    """

    tasks: str = setting(TASKS, "tasks")
    text: str | None = setting(
        None,
        f"the text of {' and '.join(FORCED)}, and of --suite attention (several files, separated "
        "by commas); None: derivations of the bundled model",
    )
    lengths: tuple[int, ...] = setting((2048,), "tokens per sample, including its answer")
    limit: int = setting(16, "samples per cell; for a text, at most its number of windows")
    setup: Names = setting(  # noqa: RUF009
        ("prompt",),
        "what is read densely before decoding: the whole prompt, or all but the question, which "
        "is then decoded under the policy like the answer; prompt,question: both setups",
    )
    policies: str = setting("delta,quest,streaming_llm", "policies to compare")
    prefill_policies: str = setting(
        "", "prefill policies to compare, each with full attention in decode steps; default: none"
    )
    budgets: Budgets = setting(  # noqa: RUF009
        ("1/8",), "tokens that a step may read, or shares of the length in whole pages"
    )
    terms: str = setting("given", "; ".join(f"{name}: {about}" for name, about in TERMS.items()))
    dense_layers: tuple[int, ...] | None = setting(
        None,
        "with --terms equal, the layers that read everything; with --terms tuned, their number; "
        "None: the first two with full attention",
    )
    sinks: int = setting(16, "with --terms equal, first tokens that are always read")
    window: int | None = setting(
        None,
        "with --terms equal, newest tokens that are always read; None: a quarter of the budget",
    )
    trials: int = setting(8, "with --terms tuned, the number of settings tried for each method")
    tuning_limit: int = setting(32, "with --terms tuned, samples per task in each trial")
    controls: bool = setting(
        False,
        "also measure each method's controls: its dense layers and budget with the newest tokens, "
        "with random tokens, and with the tokens of largest true attention",
    )
    first_seed: int = setting(0, "number of the first sample; other numbers select other samples")
    maps: bool = setting(
        False,
        "store what each policy reads of the first sample under its first budget, step by step in "
        "four layers, for the pictures of --html",
    )
    batch: int = setting(EngineConfig.max_batch, "samples decoded at once")
    kv_dtype: str = setting("auto", "data type of keys and values: int8 or fp8; auto: the model's")
    prompt_memory: int | None = setting(
        None,
        "bytes for prompts that are computed once for all policies; "
        "None: a quarter of the free memory",
    )

    def __post_init__(self) -> None:
        good = bool(self.lengths) and all(map(is_count, self.lengths))
        require(good, "lengths", self.lengths, "numbers of tokens such as 2048,8192")
        require_counts(self, "limit", "batch", "trials", "tuning_limit")
        require_counts(self, "sinks", "first_seed", least=0)
        good = self.window is None or is_count(self.window)
        require(good, "window", self.window, "at least 1 token")
        require_known("kv_dtype", self.kv_dtype, KV_DTYPES)
        require_known("terms", self.terms, TERMS)
        for name, terms in _FOR_TERMS.items():
            value = getattr(self, name)
            usual = value == type(self).__dataclass_fields__[name].default
            right = f"left out, or combined with --terms {' or '.join(terms)}"
            require(usual or self.terms in terms, name, value, right)
        require(bool(self.setup), "setup", self.setup, f"one of {SETUPS}, or both")
        for one in self.setup:
            require_known("setup", one, SETUPS)


#: Number of texts that the random twin reads; its results vary little.
TWIN_TEXTS = 4

#: Flags of `keyhole eval` that the suite `attention` takes.
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

    limit: int = setting(8, "texts per cell")
    policies: str = setting("", "methods to measure; none: all that have a budget")
    budgets: Budgets = setting(  # noqa: RUF009
        ("1/8", "1/16"), "tokens that a step may read, or shares of the length in whole pages"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        right = "given, equal or published: tuning needs right answers, which a text does not have"
        require(self.terms != "tuned", "terms", self.terms, right)

    @property
    def files(self) -> list[str]:
        """The files of `text`."""
        return [part.strip() for part in (self.text or "").split(",") if part.strip()]
