"""Models of transformers under a policy, with their own `generate`: `keyhole.sparse`."""
