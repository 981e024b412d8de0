"""The demonstration: a long recall and a long derivation under four methods with one budget.

The recall asks for one fact of a long text. The derivation carries out a shuffled program of 40
steps; each step needs two facts of the prompt and the result of an earlier step that the model
itself has written, so what a method drops of the generated text is as fatal as what it drops of the
prompt. Items are those of seed 0, whatever comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

from tqdm import tqdm

from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.llm import LLM
from keyhole.engine.sequence import Stats
from keyhole.evaluate.trace import Trace, Traced
from keyhole.models.loading import Model
from keyhole.models.tiny.tasks import Item, is_correct, make
from keyhole.policy.base import Policy
from keyhole.policy.delta import Delta
from keyhole.policy.full import Full
from keyhole.policy.quest import Quest
from keyhole.policy.streaming_llm import StreamingLLM

BUDGET = 256
_RECALL_WORDS = 2048
_DERIVE_STEPS = 40
#: Words of a program with that many steps: 24 for each, 16 of frame, 1 for the BOS.
_DERIVE_WORDS = 24 * _DERIVE_STEPS + 17


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One task under one policy."""

    task: str
    policy: str
    correct: bool
    text: str
    stats: Stats


@dataclass(frozen=True, kw_only=True)
class Demo:
    """All outcomes, the policies as they were settled, and what DELTA read in the derivation."""

    outcomes: list[Outcome]
    policies: dict[str, Policy]
    trace: Trace
    traced_prompt_tokens: int


def items() -> list[Item]:
    """The recall and the derivation."""
    return [make("recall", _RECALL_WORDS, 0), make("derive", _DERIVE_WORDS, 0)]


def run(model: Model, asked: list[Item]) -> Demo:
    """Answers all items under every policy, the last one traced as well.

    `model` must know the bundled model's words.
    """
    llms = [LLM(model, policy=policy) for policy in _policies(model)]
    work = [(item, llm) for item in asked for llm in llms]
    outcomes = [
        _answer(item, llm) for item, llm in tqdm(work, unit="run", disable=None, leave=False)
    ]
    # Once more for the picture, so that no recording slows what was timed.
    traced = Traced(_delta(model))
    seen = _answer(asked[-1], LLM(model, policy=traced))
    return Demo(
        outcomes=outcomes,
        policies={llm.policy.name: llm.policy for llm in llms},
        trace=traced.trace,
        traced_prompt_tokens=seen.stats.prompt_tokens,
    )


def _policies(model: Model) -> list[Policy]:
    """The four methods; Quest reads in full what DELTA reads in full without choosing."""
    geometry = model.geometry(EngineConfig.page_size)
    delta = _delta(model).resolve(geometry)
    quest = Quest(token_budget=BUDGET, full_layers=delta.full_layers or ())
    return [Full(), delta, quest, StreamingLLM(token_budget=BUDGET)]


def _delta(model: Model) -> Delta:
    """DELTA with the layers measured for this model, else the first full and the next choosing.

    The paper's layers are for 28 of them; of 4 they would leave none sparse.
    """
    if model.calibration is not None:
        return Delta(token_budget=BUDGET)
    return Delta(token_budget=BUDGET, full_layers=(0,), delta_layers=(1,))


def _answer(item: Item, llm: LLM) -> Outcome:
    """Greedy generation with room for the right answer and a little more."""
    room = len(item.answer.split()) + 8
    result = llm.generate(item.prompt, SamplingParams(max_tokens=room, temperature=0.0))
    return Outcome(
        task=item.task,
        policy=llm.policy.name,
        correct=is_correct(item, result.text),
        text=result.text,
        stats=result.stats,
    )
