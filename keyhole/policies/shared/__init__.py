"""What several policies share: selection layers, adaptive budgets, calibration files."""
