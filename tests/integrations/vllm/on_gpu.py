"""`make gpu-vllm`: vLLM with the plugin on a CUDA device against vLLM alone, on a small checkpoint.

    python -m tests.integrations.vllm.on_gpu

For each of vLLM's backends that Keyhole extends: a budget that covers the length gives vLLM's own
tokens, and a budget below it reads fewer keys. Where vLLM or a device is missing it says so, and
ends with code 0.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import make_model

POLICIES = ("quest", "delta", "streaming_llm", "sliding_window", "omnikv")
BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
LENGTHS = (1, 15, 16, 17, 200, 700)
BUDGET, LONGEST = 128, 1024


def answers(checkpoint: str, backend: str, policy: str | None, budget: int) -> dict[str, Any]:
    """In a process of its own: the tokens of one engine, and what it read."""
    import vllm

    asked = {"policy": policy, "token_budget": budget}
    llm = vllm.LLM(
        checkpoint,
        dtype="bfloat16",
        max_model_len=LONGEST,
        max_num_batched_tokens=256,
        gpu_memory_utilization=0.3,
        attention_config={"backend": backend},
        additional_config={} if policy is None else {"keyhole": asked},
    )
    generator = torch.Generator().manual_seed(0)
    prompts: Any = [
        {"prompt_token_ids": torch.randint(3, 259, (n,), generator=generator).tolist()}
        for n in LENGTHS
    ]
    params = vllm.SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    found = llm.generate(prompts, params, use_tqdm=False)
    return {"tokens": [list(one.outputs[0].token_ids) for one in found]}


def run(*given: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, "-m", "tests.integrations.vllm.on_gpu", out.name, *given]
        subprocess.run(command, check=True)
        return dict(json.loads(Path(out.name).read_text()))


def main() -> int:
    if importlib.util.find_spec("vllm") is None or not torch.cuda.is_available():
        print("not run: this needs vLLM (pip install 'keyhole[vllm]') and a CUDA device")
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_model(
            "llama",
            Path(folder),
            tokenizer=True,
            dtype=torch.bfloat16,
            num_hidden_layers=6,
            head_dim=64,
            max_position_embeddings=LONGEST,
        )
        for backend in BACKENDS:
            alone = run(checkpoint, backend, "", "0")
            for policy in POLICIES:
                same = run(checkpoint, backend, policy, str(LONGEST)) == alone
                sparse = run(checkpoint, backend, policy, str(BUDGET)) != alone
                wrong += (not same) + (not sparse)
                print(f"{backend} {policy}: dense equal {same}, sparse differs {sparse}")
    return int(wrong > 0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        out, checkpoint, backend, policy, budget = sys.argv[1:]
        found = answers(checkpoint, backend, policy or None, int(budget))
        Path(out).write_text(json.dumps(found))
    else:
        sys.exit(main())
