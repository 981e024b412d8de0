"""The size of the bundled model, as a standard Llama configuration."""

from transformers import LlamaConfig

from keyhole.eval.tiny_language.vocabulary import BOS, EOS, PAD, VOCABULARY_SIZE, WORD_IDS


def llama_config(
    num_layers: int = 6, hidden_size: int = 192, rope_theta: float = 1e8
) -> LlamaConfig:
    """Give the configuration of a model with `num_layers` layers.

    `rope_theta` divides the 16 rotations of a head of 32 numbers: 5 fast ones to count back by
    without mistaking a distance for another (1e10 leaves 4, too few: see benchmarks/LOG.md), the
    slow ones, which hardly turn over thousands of tokens, to compare contents by.
    """
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=WORD_IDS[BOS],
        eos_token_id=WORD_IDS[EOS],
        pad_token_id=WORD_IDS[PAD],
    )
