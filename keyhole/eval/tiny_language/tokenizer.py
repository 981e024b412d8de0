"""The tokenizer of the bundled model. Apart from its words, as it imports transformers."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from keyhole.eval.tiny_language.vocabulary import BOS, CHAT_TEMPLATE, EOS, PAD, WORD_IDS


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Give the word-level tokenizer, complete with chat template, ready for `save_pretrained`."""
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
