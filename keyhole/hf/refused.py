"""What `sparse` refuses, and how it says so."""

from __future__ import annotations

from keyhole.errors import ConfigError

#: What a forward may be asked for, and we cannot give.
OPTIONS = {
    "output_attentions": "attention weights are never made",
    "output_router_logits": "padding is taken out before the routers run",
    "labels": "a loss needs gradients or a whole text: compute it from the logits",
}


def unsupported(what: str) -> ConfigError:
    """The error for something that transformers can do, and we cannot."""
    return ConfigError(f"keyhole.sparse does not go with {what}")
