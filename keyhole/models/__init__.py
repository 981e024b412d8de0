"""Stock transformers models over our cache: loading, and the one function that attention calls."""
