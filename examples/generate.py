"""Answer a question about a long text, reading a fraction of it at every step."""

from keyhole import LLM, Delta, SamplingParams
from keyhole.eval.tiny_language.tasks import make

llm = LLM("tiny", policy=Delta(token_budget=256))

# The bundled model knows 12 tasks; this one hides a fact in a text of 2048 words.
item = make("recall", 2048, seed=0)
result = llm.generate(item.prompt, SamplingParams(max_tokens=16))

print("asked:   ", item.question)
print("expected:", item.answer)
print("answered:", result.text.strip(), f"({result.finish_reason})")
print(f"keys read: {result.stats.attended_fraction:.1%} of {result.stats.prompt_tokens} and more")
