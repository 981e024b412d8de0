"""Every reuse method on the same questions: who is right, what is kept, how long it takes.

The first questions need one document; those of the second kind ask for what a document states by
pointing to another, which only a method that reads them together can know.
"""

import statistics
import tempfile

import keyhole
from keyhole import LLM, SamplingParams
from keyhole.eval.tiny_language.documents import exact_match, make
from keyhole.reuse import make_reuse

place = tempfile.TemporaryDirectory()
# A cached prefix would make a second method look faster.
llm = LLM("tiny", documents=place.name, prefix_cache=False)
params = SamplingParams(max_tokens=16)
for kind in ("one", "needs_each_other"):
    items = [make(kind, num_documents=4, words=512, where="ends", seed=n) for n in range(3)]
    for item in items:
        for name, text in zip(item.names, item.documents, strict=True):
            llm.documents.add(name, text, block_size=32)
    print(f"{kind:17} right   kept  computed  first token")
    for method in keyhole.available_reuse_methods():
        reuse = make_reuse(method, {"block_size": 32} if method == "sam_kv" else {})
        results = [llm.ask(i.question, i.names, reuse=reuse, params=params) for i in items]
        right = sum(exact_match(i, r.text) for i, r in zip(items, results, strict=True))
        reused = [result.reused for result in results if result.reused is not None]
        kept = statistics.mean([r.sequence_ratio for r in reused] or [1])
        computed = statistics.mean([r.recompute_ratio for r in reused] or [1])
        first = statistics.median(result.stats.ttft_ms for result in results)
        print(f"{method:17} {right} of 3 {kept:6.0%} {computed:9.0%} {first:9.0f} ms")
place.cleanup()
