"""Operations that PyTorch composes of others, on every device."""
