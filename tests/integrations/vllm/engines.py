"""Engines of vLLM for the tests: small, on the CPU, started once for many tests.

python -m tests.integrations.vllm.engines CHECKPOINT OUT    # vLLM alone: its answers as JSON
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

#: Before vLLM is imported. Threads that spin starve each other on a busy machine.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.update(ENVIRONMENT)

import torch  # noqa: E402 - after the environment is set
import vllm  # noqa: E402

from keyhole.cache.layout import Geometry, LayerLayout  # noqa: E402
from keyhole.config import SamplingParams  # noqa: E402
from keyhole.integrations.vllm.page_policy import page_policy  # noqa: E402
from keyhole.llm import LLM  # noqa: E402
from keyhole.policies import make_policy  # noqa: E402
from keyhole.policies.base import Policy  # noqa: E402
from tests.checkpoints import make_model  # noqa: E402

PAGE_SIZE = 32
MAX_LENGTH = 768
#: 64 pages, of which vLLM keeps one: a few long requests fill them.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": PAGE_SIZE,
    "max_model_len": MAX_LENGTH,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 64,
    "seed": 0,
}


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Token ids of the checkpoints of `tests.checkpoints`, special ones left out."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 259, (n,), generator=generator).tolist() for n in lengths]


#: A token, a page less one, a page, and one more, and prompts of several chunks.
PROMPTS = random_prompts(1, 31, 32, 33, 150, 300)
NUM_TOKENS = 40


def start(checkpoint: str, **settings: Any) -> vllm.LLM:
    return vllm.LLM(checkpoint, **(SETTINGS | settings))


def answers(
    llm: vllm.LLM, prompts: list[list[int]] = PROMPTS, max_tokens: int = NUM_TOKENS
) -> list[tuple[list[int], list[float]]]:
    """The greedy tokens of each prompt, and their log-probabilities."""
    params = vllm.SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=1
    )
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for output in llm.generate(given, params, use_tqdm=False):
        one = output.outputs[0]
        assert one.logprobs is not None
        steps = zip(one.token_ids, one.logprobs, strict=True)
        found.append((list(one.token_ids), [step[token].logprob for token, step in steps]))
    return found


POLICIES: dict[str, dict[str, Any]] = {
    "sliding_window": {"full_layers": (0,)},
    "streaming_llm": {"full_layers": (0,), "sink_size": 4},
    "quest": {},
    "quest_per_query_head": {"share_group": False},
    "delta": {"full_layers": (0, 1), "delta_layers": (2, 4)},
    "omnikv": {"full_layers": (0, 1), "filter_layers": (2,), "dense_after": 0},
}
LAYERS = 6


def make_checkpoint(folder: Path) -> str:
    return make_model(
        "llama",
        folder,
        tokenizer=True,
        num_hidden_layers=LAYERS,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
    )


def policy_name(name: str) -> str:
    return "quest" if name == "quest_per_query_head" else name


def own_tokens(
    checkpoint: str, policy: Policy, prompts: list[list[int]] = PROMPTS, count: int = NUM_TOKENS
) -> list[list[int]]:
    """The tokens of Keyhole's own engine, with pages of the same size."""
    llm = LLM(checkpoint, policy, dtype="float32", device="cpu", memory="64MB", page_size=PAGE_SIZE)
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(result.token_ids) for result in llm.generate(given, params)]


def paged(name: str, **settings: Any) -> Policy:
    """The policy as the adapter runs it, resolved for the checkpoint."""
    layer = LayerLayout(num_kv_heads=2, key_dim=64, value_dim=64, num_query_heads=4)
    geometry = Geometry(
        layers=(layer,) * LAYERS, num_query_heads=4, page_size=PAGE_SIZE, itemsize=4
    )
    return page_policy(make_policy(policy_name(name), settings), geometry)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(answers(start(sys.argv[1]))))
