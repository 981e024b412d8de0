"""Controls that methods are compared with: full attention, recency, random tokens, an oracle."""
