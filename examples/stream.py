"""Print a long derivation as it comes; leaving the loop early would free the request."""

from keyhole import LLM, Delta, SamplingParams
from keyhole.eval.tiny_language.tasks import make

llm = LLM("tiny", policy=Delta(token_budget=128))
item = make("derive", 512, seed=0)

result = None
for piece in llm.stream(item.prompt, SamplingParams(max_tokens=400)):
    print(piece.text, end="", flush=True)
    result = piece.result  # the last piece carries it

print()
print("right:", result.text.split() == item.answer.split())
print(f"{result.stats.generated_tokens} tokens, {result.stats.step_ms:.1f} ms each (median)")
