"""The demonstration: a long recall and a long derivation under three sparse methods with one
budget.

The recall asks for one fact of a long text. The derivation carries out a shuffled program of 40
steps; each step needs two facts from the prompt and the result of an earlier step that the model
itself has written, so losing generated text is as harmful as losing the prompt. Both use seed 0; no
seed was chosen for its outcome.

Each method has a control: the same dense layers, first tokens and budget, and the newest tokens
instead of a selection. If both are right, the selection is not the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tqdm.auto import tqdm

from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.sequence import Result, Stats
from keyhole.eval.methods import controls_of
from keyhole.eval.policy_trace import Trace, Traced
from keyhole.eval.tiny_language.tasks import Item, is_correct, make
from keyhole.llm import LLM
from keyhole.models.model import Model
from keyhole.policies.base import Policy
from keyhole.policies.controls import Full
from keyhole.policies.delta import Delta
from keyhole.policies.quest import Quest
from keyhole.policies.streaming_llm import StreamingLLM

BUDGET = 256
_RECALL_WORDS = 2048
_DERIVE_STEPS = 40
#: Words of a program with that many steps: 24 per step, 16 around them, and the BOS.
_DERIVE_WORDS = 24 * _DERIVE_STEPS + 17


@dataclass(frozen=True, kw_only=True)
class DemoOutcome:
    """One task under one policy, or under the control of that policy."""

    task: str
    policy: str
    is_control: bool
    correct: bool
    text: str
    stats: Stats


@dataclass(frozen=True, kw_only=True)
class Demo:
    """All outcomes, and the resolved policies by name.

    dense: the layers that each policy reads in full. controls: of the methods that select; a method
    without a selection is its own control and has no entry.
    """

    outcomes: list[DemoOutcome]
    policies: dict[str, Policy]
    dense: dict[str, tuple[int, ...]]
    controls: dict[str, Policy]


@dataclass(frozen=True)
class _Entry:
    """A method or its control, with its engine."""

    name: str
    is_control: bool
    llm: LLM


def items() -> list[Item]:
    """The recall and the derivation."""
    return [make("recall", _RECALL_WORDS, 0), make("derive", _DERIVE_WORDS, 0)]


def run(model: Model, asked: list[Item]) -> Demo:
    """Answers all items under every policy and control.

    `model` must have the bundled model's vocabulary.
    """
    geometry = model.geometry(EngineConfig.page_size)
    entries = []
    for policy in _policies(model):
        own = LLM(model, policy=policy)
        entries.append(_Entry(own.policy.name, False, own))
        control = controls_of(own.policy, geometry).get("recent")
        if control is not None and control != own.policy:
            entries.append(_Entry(own.policy.name, True, LLM(model, policy=control)))
    work = [(item, entry) for item in asked for entry in entries]
    policies = {entry.name: entry.llm.policy for entry in entries if not entry.is_control}
    return Demo(
        outcomes=[
            _outcome(item, entry)
            for item, entry in tqdm(work, unit="run", disable=None, leave=False)
        ],
        policies=policies,
        dense={name: policy.dense_layers(geometry) for name, policy in policies.items()},
        controls={entry.name: entry.llm.policy for entry in entries if entry.is_control},
    )


def traced(model: Model, item: Item) -> tuple[Trace, int]:
    """What DELTA reads while it answers an item, and the number of prompt tokens.

    This is a separate run, because recording slows the steps.
    """
    policy = Traced(_delta(model))
    result = _answer(item, LLM(model, policy=policy))
    return policy.trace, result.stats.prompt_tokens


def verdicts(outcomes: Sequence[DemoOutcome]) -> list[str]:
    """What each control shows about its method, one line for all tasks with the same two answers.

    Tasks that full attention answers wrongly are left out.
    """
    right = {(one.policy, one.is_control, one.task): one.correct for one in outcomes}
    asked = dict.fromkeys(one.task for one in outcomes)
    known = [task for task in asked if right.get((Full.name, False, task), True)]
    lines = []
    for method in dict.fromkeys(one.policy for one in outcomes if one.is_control):
        found: dict[tuple[bool, bool], list[str]] = {}
        for task in known:
            both = right[method, False, task], right[method, True, task]
            found.setdefault(both, []).append(task)
        for both, tasks in found.items():
            says = _SAYS[both].format(
                method=method, cannot=f"{'this task' if len(tasks) == 1 else 'these tasks'} cannot"
            )
            lines.append(f"{', '.join(tasks)}: {says}")
    return lines


#: By whether a method and its control are right.
_SAYS = {
    (True, True): "{method} and its control are both right, so {cannot} tell whether "
    "{method}'s selection matters",
    (True, False): "{method} is right and its control wrong, so its selection found what the "
    "newest tokens lack",
    (False, True): "{method} is wrong and its control right, so its selection is worse than the "
    "newest tokens",
    (False, False): "{method} and its control are both wrong, so its selection does not help here",
}


def _policies(model: Model) -> list[Policy]:
    """The four methods; Quest reads in full the layers that DELTA reads in full without
    selecting.
    """
    geometry = model.geometry(EngineConfig.page_size)
    delta = _delta(model).resolve(geometry)
    quest = Quest(token_budget=BUDGET, full_layers=delta.full_layers or ())
    return [Full(), delta, quest, StreamingLLM(token_budget=BUDGET)]


def _delta(model: Model) -> Delta:
    """DELTA with the calibrated layers of this model, else layer 0 full and layer 1 selecting.

    The paper's layers are for a model of 28; in one of 4 they would leave no sparse layer.
    """
    if model.calibration is not None:
        return Delta(token_budget=BUDGET)
    return Delta(token_budget=BUDGET, full_layers=(0,), delta_layers=(1,))


def _answer(item: Item, llm: LLM) -> Result:
    """Greedy generation with room for the right answer and a few more tokens."""
    room = len(item.answer.split()) + 8
    return llm.generate(item.prompt, SamplingParams(max_tokens=room, temperature=0.0))


def _outcome(item: Item, entry: _Entry) -> DemoOutcome:
    result = _answer(item, entry.llm)
    return DemoOutcome(
        task=item.task,
        policy=entry.name,
        is_control=entry.is_control,
        correct=is_correct(item, result.text),
        text=result.text,
        stats=result.stats,
    )
