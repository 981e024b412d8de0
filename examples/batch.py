"""Many requests at once: prompts of any length, and a start that they share is computed once."""

from keyhole import LLM, Delta, SamplingParams
from keyhole.eval.tiny_language.tasks import make, shared

llm = LLM("tiny", policy=Delta(token_budget=128), max_batch=4)

ragged = [make("recall", length, seed=1).prompt for length in (128, 900, 300, 1500)]
for result in llm.generate(ragged, SamplingParams(max_tokens=16)):
    print(f"{result.stats.prompt_tokens:5} tokens:", result.text.strip())

# Several questions about one text: only the first request computes it.
first, *others = shared(1024, seed=1)
llm.generate(first.prompt, SamplingParams(max_tokens=40))
for result in llm.generate([item.prompt for item in others], SamplingParams(max_tokens=40)):
    stats = result.stats
    print(f"{stats.cached_prompt_tokens} of {stats.prompt_tokens} prompt tokens were known")
