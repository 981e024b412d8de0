"""The section "Speed" of docs/vllm.md, from the last stored line of `vllm_plugin`.

python -m benchmarks.serving.vllm_page    # writes it, between two comments
"""

from __future__ import annotations

import shlex
from typing import Any

from benchmarks import ROOT
from benchmarks.results_page.text import between, written
from benchmarks.speed_pages import stored
from benchmarks.speed_pages.tables import command

BEGIN = "<!-- speed: python -m benchmarks.serving.vllm_page -->\n"
END = "<!-- end of speed -->"
PAGE = ROOT / "docs/vllm.md"
_HEADS = "prompt;batch;policy;keys read;vLLM alone;with the plugin;ratio;target".split(";")


def section(line: dict[str, Any]) -> str:
    """A table of step times, ratios and targets, and how it was measured."""
    rows = []
    bars = iter(line["bars"])
    for result in line["results"]:
        for one in result["policies"]:
            bar = next(bars)
            budget = one["settings"].get("token_budget")
            policy = f"`{one['policy']}`" + ("" if budget is None else f", budget {budget:,}")
            rows.append(
                [
                    f"{result['context']:,}",
                    str(result["batch"]),
                    policy,
                    f"{one['attended_fraction']:.0%}",
                    f"{result['vllm_step_ms']:.0f} ms",
                    f"{one['step_ms']:.0f} ms",
                    f"{bar['value']:.2f}",
                    f"{bar['wanted']}, {'met' if bar['met'] else 'missed'}",
                ]
            )
    settings, machine, versions = (line[name] for name in ("settings", "machine", "versions"))
    kind = "with `torch.compile`" if settings["compile"] else "with `enforce_eager`"
    note = f" Note: {line['note']}." if line["note"] else ""
    about = (
        f"Median time of a decode step, and tokens per second relative to vLLM alone (median of "
        f"{settings['rounds']} rounds of\n{settings['steps']} steps; the two engines take turns). "
        f"Shape of {settings['shape']} in bfloat16, {kind}; {machine['cpu']},\n{machine['cores']} "
        f"cores, load average {machine['load_average']}; vLLM {versions['vllm']}, torch "
        f"{versions['torch']}; {line['date'][:10]}, commit {line['commit']};\n"
        f"`{shlex.join(command(line))}`.{note}"
    )
    return f"{written(_HEADS, rows)}\n\n{about}\n"


def main() -> None:
    """Rewrites the section."""
    PAGE.write_text(between(PAGE.read_text(), BEGIN, END, section(stored("vllm")[-1])))


if __name__ == "__main__":
    main()
