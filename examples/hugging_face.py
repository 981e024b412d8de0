"""Switch a policy on in a model of transformers; its own `generate` runs, as it is."""

from transformers import AutoModelForCausalLM, AutoTokenizer

import keyhole
from keyhole import Delta
from keyhole.eval.tiny_language.tasks import make

model = AutoModelForCausalLM.from_pretrained(keyhole.tiny())
tokenizer = AutoTokenizer.from_pretrained(keyhole.tiny(), padding_side="left")

items = [make("recall", length, seed=0) for length in (900, 2048)]
inputs = tokenizer([item.prompt for item in items], return_tensors="pt", padding=True)
inputs.pop("token_type_ids", None)

with keyhole.sparse(model, Delta(token_budget=256)) as run:
    out = model.generate(**inputs, max_new_tokens=16, do_sample=False)

for item, row in zip(items, out[:, inputs["input_ids"].shape[1] :], strict=True):
    print("expected:", item.answer)
    print("answered:", tokenizer.decode(row, skip_special_tokens=True).strip())
print(f"keys read: {run.stats.attended_fraction:.1%}")
