"""What methods are compared with: full attention, recency, random tokens, perfect selection."""
