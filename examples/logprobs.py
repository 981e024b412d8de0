"""How a policy changes what the model thinks: log-probabilities beside those of full attention."""

from keyhole import LLM, Delta, SamplingParams, StreamingLLM
from keyhole.eval.tiny_language.tasks import make
from keyhole.models.loading import load

model = load("tiny")
prompt = make("recall", 1024, seed=2).prompt
params = SamplingParams(max_tokens=5, logprobs=3)

for policy in (None, Delta(token_budget=128), StreamingLLM(token_budget=128)):
    llm = LLM(model, policy)
    result = llm.generate(prompt, params)
    print(llm.policy.name)
    for token, found in zip(result.token_ids, result.logprobs, strict=True):
        chosen = llm.tokenizer.decode([token])
        others = {llm.tokenizer.decode([t]): f"{p:.3f}" for t, p in found.items() if t != token}
        print(f"  {chosen:10} {found[token]:8.3f}   others: {others}")
