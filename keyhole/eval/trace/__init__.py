"""What a policy reads, recorded step by step."""
