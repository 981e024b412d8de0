"""The KV cache: layouts, reference-counted pages, shared prefixes."""
