"""Put every policy on the same questions under one budget: who is right, and what was read."""

import keyhole
from keyhole import LLM, SamplingParams
from keyhole.eval.tiny_language.tasks import make
from keyhole.models.loading import load
from keyhole.policies import make_policy

BUDGET = 128
items = [make("multikey", 1024, seed) for seed in range(4)]
params = SamplingParams(max_tokens=16)

model = load("tiny")  # loaded once; the engines share its weights
print("policy           right   keys read")
for name in keyhole.available_policies():
    settings = {} if name == "full" else {"token_budget": BUDGET}
    llm = LLM(model, make_policy(name, settings))
    results = llm.generate([item.prompt for item in items], params)
    pairs = zip(results, items, strict=True)
    right = sum(result.text.split() == item.answer.split() for result, item in pairs)
    share = sum(result.stats.attended_fraction for result in results) / len(results)
    print(f"{name:15} {right:2} of {len(items)}   {share:8.1%}")
