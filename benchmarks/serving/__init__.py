"""`keyhole serve` measured and worn: what HTTP costs (overhead), and many requests (soak)."""
