"""The document store: documents encoded once, on disk or at a URL."""
