"""A text that outgrows its memory: layers move to a folder, and the answer is the same."""

import tempfile

from keyhole import LLM, Delta, SamplingParams
from keyhole.eval.tiny_language.tasks import make

question = make("derive", 977, seed=0)
params = SamplingParams(max_tokens=700, temperature=0.0)
policy = Delta(token_budget=256)

plenty = LLM("tiny", policy=policy, max_batch=1).generate(question.prompt, params)
with tempfile.TemporaryDirectory() as folder:
    llm = LLM("tiny", policy=policy, max_batch=1, memory="2MiB", offload=folder)
    little = llm.generate(question.prompt, params)

print("same answer:", little.token_ids == plenty.token_ids)
stats = little.stats
print(f"{stats.offloaded_layers} layers moved; {stats.hit_rate:.0%} of what they read was there")
