"""Methods and their controls on the bundled models, for docs/results/.

    python -m benchmarks.claims [--parts equal tuned published recency lists] [--dry-run]
    python -m benchmarks.claims --render

A part is a list of `keyhole eval` commands with one file in benchmarks/results/. A command skips
what the file already has, so an interrupted run resumes when it is called again.
`--render` writes the pages and their figures from the stored lines. Each process uses one core
(OMP_NUM_THREADS=1), so parts may run in parallel.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import benchmarks
from benchmarks import results_page
from benchmarks.results_page.controls import FILES, HOPS, SCRATCH
from keyhole.policies import available_policies

SAMPLES = 100
BUDGETS = "64,128,256"
#: (Task, what is read densely before the first sparse step) -> lengths.
PLACES = {
    ("tiny_vartrack", "question"): (1024, 2048, 4096),
    ("tiny_reference", "question"): (1024, 2048, 4096),
    ("tiny_derive", "prompt"): (512, 1024),
}
#: The places where settings are also tuned, on other samples, which takes three times as long.
TUNED_PLACES = {
    ("tiny_vartrack", "question"): (1024, 2048, 4096),
    ("tiny_derive", "prompt"): (512,),
}
#: The places where a setting that only one method has is varied.
FEW_PLACES = {("tiny_vartrack", "question"): (2048,), ("tiny_derive", "prompt"): (512,)}
#: Newest pages of DELTA's budget, as in table 1 of its paper; layer 0 is dense and layer 1 selects.
RECENT_PAGES = (1, 2, 4, 8, 16)
#: Layers that select for DELTA besides layer 1: every one that there is in both models.
SELECTION_LAYERS = range(2, 8)
#: In `tiny-hops` only one task needs a layer behind those that all of these placements share.
_PLACEMENTS_AT = {
    HOPS: {("tiny_walk2", "prompt"): (1024,)},
    SCRATCH: {("tiny_walk2", "prompt"): (1024,), ("tiny_derive", "prompt"): (1024,)},
}
#: Where the criteria of `benchmarks.paper.placements` place three of them.
THREE_SELECT = {
    HOPS: ("1,3,4", "1,4,5", "1,2,6", "1,3,6", "1,2,3", "1,2,5"),
    SCRATCH: ("1,2,3", "1,2,4", "1,2,7", "1,4,5"),
}
_METHODS = ",".join(name for name, cls in available_policies().items() if not cls.dense)
#: Samples in a cell of `tiny-hops`, whose controls answer nothing and whose oracle nearly all.
HOPS_SAMPLES = 24
#: Places of `tiny-hops`.
HOPS_PLACES = {
    ("tiny_walk", "prompt"): (512, 1024, 2048),
    ("tiny_walk2", "prompt"): (1024, 2048, 4096),
    ("tiny_derive", "prompt"): (1024, 2048, 4096),
}
#: Where `keyhole-scratch` is from the root of the repository.
SCRATCH_MODEL = "recipes/tiny_model/keyhole-scratch"
_SCRATCH_TASKS = ("tiny_walk2", "prompt"), ("tiny_derive", "prompt")
#: Places of `keyhole-scratch`, and those of them where settings are also tuned, which takes hours.
SCRATCH_PLACES = dict.fromkeys(_SCRATCH_TASKS, (512, 1024, 2048, 4096))
SCRATCH_TUNED_PLACES = dict.fromkeys(_SCRATCH_TASKS, (512, 1024, 2048))
HOPS_FEW_PLACES = dict.fromkeys(HOPS_PLACES, (1024,))
#: Those that can have equal terms, and those of them that can be as published.
_HOPS_METHODS = (
    "quest,quest:share_group=False,delta,tidal_decode,tidal_decode:share_group=False,omnikv,infllm,"
    "clusterkv,clusterkv:share_group=False,shadowkv,spe_context,streaming_llm"
)
_HOPS_PUBLISHED = (
    "spe_context,quest,delta,tidal_decode,omnikv,infllm,clusterkv,shadowkv,streaming_llm,raas,r_kv,"
    "snapkv"
)
_HOPS_BUDGETS = "1/8,1/4,1/16"


@dataclass(frozen=True, kw_only=True)
class ClaimPart:
    """flags: for every command. places: as in PLACES. samples: in a cell."""

    flags: Sequence[str]
    places: Mapping[tuple[str, str], tuple[int, ...]]
    samples: int = SAMPLES

    def commands(self, file: str) -> list[list[str]]:
        """One command per task and length, short texts first."""
        every = [(n, *place) for place, lengths in self.places.items() for n in lengths]
        return [
            [
                *("keyhole", "eval", "--tasks", task, "--setup", setup, "--lengths", str(length)),
                *("--limit", str(self.samples), "--batch", str(self.samples), "--controls"),
                *self.flags,
                *("--output", f"benchmarks/results/{file}"),
            ]
            for length, task, setup in sorted(every, key=lambda at: at[0])
        ]


def _delta() -> str:
    """DELTA at equal dense layers, with every window smaller than the budget."""
    return ",".join(
        f"delta:full_layers=0,delta_layers=1,recent_pages={pages},token_budget={budget}"
        for budget in map(int, BUDGETS.split(","))
        for pages in RECENT_PAGES
        if pages * 16 <= budget
    )


def _placements(model: str) -> str:
    """DELTA with every second selection layer, without one, and with the two that a calibration
    chooses; first tokens, window and budget as at equal terms.
    """
    layers = ["1", *(f"1,{layer}" for layer in SELECTION_LAYERS), *THREE_SELECT[model]]
    return ",".join(
        f"delta:full_layers=0,delta_layers={at},recent_pages=2,sink_size=16,token_budget=128"
        for at in layers
    )


PARTS = {
    "equal": ClaimPart(
        flags=["--terms", "equal", "--policies", _METHODS, "--budgets", BUDGETS], places=PLACES
    ),
    "tuned": ClaimPart(
        flags=[
            *("--terms", "tuned", "--trials", "6", "--tuning-limit", "24"),
            *("--policies", _METHODS, "--budgets", BUDGETS),
        ],
        places=TUNED_PLACES,
    ),
    "published": ClaimPart(
        flags=["--terms", "published", "--policies", _METHODS, "--budgets", "256"],
        places=FEW_PLACES,
    ),
    "recency": ClaimPart(flags=["--policies", _delta()], places=FEW_PLACES),
    "lists": ClaimPart(
        flags=[
            *("--terms", "equal", "--budgets", BUDGETS),
            *("--policies", "spe_context:per_head=True,spe_context:per_head=False"),
        ],
        places=FEW_PLACES,
    ),
}
#: Methods and further flags at all terms of the models whose tasks need several look-ups.
_HOPS_TERMS: dict[str, tuple[str, list[str]]] = {
    "equal": (_HOPS_METHODS, []),
    "published": (_HOPS_PUBLISHED, []),
    "tuned": (_HOPS_METHODS, ["--trials", "6", "--tuning-limit", "12"]),
}
PARTS |= {
    prefix + name: ClaimPart(
        flags=[
            *("--model", model, "--terms", name, *flags),
            *("--policies", ",".join([methods, *gated]), "--budgets", _HOPS_BUDGETS),
        ],
        places=tuned_places if name == "tuned" else places,
        samples=HOPS_SAMPLES,
    )
    for prefix, model, gated, places, tuned_places in (
        (HOPS, "tiny-hops", [], HOPS_PLACES, HOPS_PLACES),
        (SCRATCH, SCRATCH_MODEL, ["seer_attention_r"], SCRATCH_PLACES, SCRATCH_TUNED_PLACES),
    )
    for name, (methods, flags) in _HOPS_TERMS.items()
}
PARTS |= {
    prefix + name: ClaimPart(flags=["--model", model, *flags], places=places, samples=HOPS_SAMPLES)
    for prefix, model, places in (
        (HOPS, "tiny-hops", HOPS_FEW_PLACES),
        # With layer 3 sparse no selection answers `tiny_walk2`.
        (SCRATCH, SCRATCH_MODEL, {("tiny_derive", "prompt"): (1024,)}),
    )
    for name, flags in (
        ("recency", ["--policies", _delta()]),
        (
            "lists",
            [
                *("--terms", "equal", "--budgets", _HOPS_BUDGETS),
                *("--policies", "spe_context,spe_context:per_head=False"),
            ],
        ),
    )
}
PARTS |= {
    prefix + "placements": ClaimPart(
        flags=["--model", model, "--policies", _placements(prefix)],
        places=_PLACEMENTS_AT[prefix],
        samples=HOPS_SAMPLES,
    )
    for prefix, model in ((HOPS, "tiny-hops"), (SCRATCH, SCRATCH_MODEL))
}


def main() -> None:
    """Runs the commands of the requested parts, then writes the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=[*PARTS])
    parser.add_argument("--dry-run", action="store_true", help="only show the commands")
    parser.add_argument("--render", action="store_true", help="only write the pages")
    arguments = parser.parse_args()
    for name in () if arguments.render else arguments.parts:
        for command in PARTS[name].commands(FILES[name]):
            print(shlex.join(command), flush=True)
            if not arguments.dry_run:
                run(command)
    if not arguments.dry_run:
        results_page.write(benchmarks.results(), benchmarks.ROOT / "docs")


def run(command: Sequence[str]) -> None:
    """Runs the `keyhole` of this environment on one core; CalledProcessError if it fails."""
    program = str(Path(sys.executable).with_name(command[0]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [program, *command[1:]], cwd=benchmarks.ROOT, env=environment, check=False
    )
    if done.returncode not in (0, 1):  # 1: a method was refused for this model or these terms
        raise subprocess.CalledProcessError(done.returncode, command)


if __name__ == "__main__":
    main()
