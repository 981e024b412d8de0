"""Turn a training snapshot into a standard Llama folder that any loader understands.

python -m recipes.tiny_model.export --run runs/tiny --out keyhole/models/tiny/keyhole-tiny
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from keyhole.eval.tiny_language.tokenizer import build_tokenizer
from keyhole.eval.tiny_language.vocabulary import BOS, EOS, PAD, WORD_IDS
from recipes.tiny_model import snapshot


def export(run: Path, out: Path) -> None:
    """Write weights (float32), configuration and tokenizer to `out`, replacing what was there.

    The new folder takes the old one's place by renaming, so a reader never sees half of it.
    """
    state = snapshot.load(run)
    model = LlamaForCausalLM(snapshot.config_of(state)).float()
    missing, unexpected = model.load_state_dict(state["weights"], strict=False)
    assert missing in ([], ["lm_head.weight"])  # the output matrix is the embedding
    assert not unexpected
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=WORD_IDS[BOS],
        eos_token_id=WORD_IDS[EOS],
        pad_token_id=WORD_IDS[PAD],
        do_sample=False,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
        new, old = Path(folder) / "new", Path(folder) / "old"
        model.save_pretrained(new)
        build_tokenizer().save_pretrained(new)
        for path in (new, *new.iterdir()):  # some are written for their owner only
            path.chmod(0o755 if path.is_dir() else 0o644)
        if out.exists():
            out.rename(old)
        new.rename(out)


def main() -> None:
    """Read the command line and export."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    export(arguments.run, arguments.out)


if __name__ == "__main__":
    main()
