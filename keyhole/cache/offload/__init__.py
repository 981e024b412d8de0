"""Memory tiers, the resident buffer of offloaded layers, and prefetching."""
