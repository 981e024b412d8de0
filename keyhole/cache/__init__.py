"""Where keys and values live: layouts, pages with reference counts, shared prefixes."""
