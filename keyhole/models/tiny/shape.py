"""The size of the bundled model, as a standard Llama configuration."""

from transformers import LlamaConfig

from keyhole.models.tiny.vocabulary import BOS, EOS, PAD, VOCABULARY_SIZE, WORD_IDS


def llama_config(
    num_layers: int = 4, hidden_size: int = 192, rope_theta: float = 1e10
) -> LlamaConfig:
    """Give the configuration of a model with `num_layers` layers.

    `rope_theta` is far above Llama's: a head of 32 numbers has only 16 rotation frequencies, and
    matching by content over 16k tokens works only in those that hardly turn over that distance.
    1e10 leaves 10 of the 16 (1e7 would leave 6), and still 4 fast ones to count back by.
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
