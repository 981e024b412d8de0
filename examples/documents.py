"""Store documents once and ask over them: only a part is kept, and little is computed again."""

import tempfile

from keyhole import LLM, SamKV, SamplingParams
from keyhole.eval.tiny_language.documents import make

# Without documents=, they go to the user's cache folder and stay there.
place = tempfile.TemporaryDirectory()
llm = LLM("tiny", documents=place.name)

# A fact that one of four documents states by pointing to another.
item = make("needs_each_other", num_documents=4, words=512, where="ends", seed=0)
for name, text in zip(item.names, item.documents, strict=True):
    # Blocks of 64 tokens unless said; these texts are short. A second time would do nothing.
    llm.documents.add(name, text, block_size=32)

answer = llm.ask(
    item.question,
    documents=item.names,
    reuse=SamKV(block_size=32),
    params=SamplingParams(max_tokens=16),
)
print("asked:   ", item.question)
print("expected:", item.answer)
print("answered:", answer.text.strip())

reused = answer.reused
print(f"{reused.sequence_ratio:.0%} of {reused.kept.shape[1]} tokens kept,", end=" ")
print(f"{reused.tokens_not_computed} not computed, {reused.bytes_read:,} bytes read")
print("share of middle blocks kept:", *(f"{share:.2f}" for share in reused.shares))
place.cleanup()
