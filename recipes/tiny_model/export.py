"""Exports a training snapshot as a standard Llama folder that any loader understands.

python -m recipes.tiny_model.export --run runs/tiny --out keyhole/models/tiny/keyhole-tiny
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from keyhole.eval.tiny_language.world import BOS, CHAT_TEMPLATE, EOS, PAD, WORD_IDS
from recipes.tiny_model import trainer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the word-level tokenizer with its chat template, ready for `save_pretrained`."""
    tokenizer = Tokenizer(WordLevel(WORD_IDS, unk_token=PAD))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, WORD_IDS[BOS])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=PAD,
        model_max_length=16384,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def export(run: Path, out: Path) -> None:
    """Write weights (float32), configuration and tokenizer to `out`, replacing its contents.

    The new folder replaces the old one by renaming, so a reader never sees a partial folder.
    """
    state = trainer.load_snapshot(run)
    model = LlamaForCausalLM(trainer.config_of(state)).float()
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
        for path in (new, *new.iterdir()):  # some are created readable only by their owner
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
