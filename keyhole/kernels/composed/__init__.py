"""Operations that are written in PyTorch over `operations`, which backends compute."""
