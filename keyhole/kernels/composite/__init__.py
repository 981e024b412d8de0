"""Operations composed of PyTorch operations, on every device."""
