"""A server's address, access and limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from keyhole.config import is_count, is_number, require, require_counts, setting
from keyhole.errors import ConfigError
from keyhole.server.chat.tool_parser import FORMATS

LOG_FORMATS = ("text", "json")
#: The settings that a batch has, too.
BATCH_SETTINGS = ("served_model_name", "tool_parser", "max_completions", "timeout", "embeddings")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Address, keys and limits of a server."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: any that is free")
    api_key: tuple[str, ...] = setting((), "key that callers must send as a bearer token")
    insecure: bool = setting(False, "listen beyond this machine without a key")
    max_queue: int = setting(256, "requests that may wait; further ones get status 429")
    max_body: int = setting(10 * 2**20, "largest body of a request, such as 20MiB")
    max_completions: int = setting(64, "largest number of prompts times n in one request")
    max_documents: int = setting(1000, "documents that each API key may store")
    embeddings: str | None = setting(
        None,
        "folder of a sentence encoder, to search documents by meaning; None: by words",
    )
    stream_interval: float = setting(
        0.05,
        "longest time in seconds that tokens are held back, to be sent together when many streams "
        "run; 0: never",
    )
    timeout: float | None = setting(None, "seconds that a request may take; None: no limit")
    drain_timeout: float = setting(
        30.0, "seconds that running requests have to finish when the server stops"
    )
    tool_parser: str = setting(
        "auto", f"format of the model's tool calls: auto (from its template), {', '.join(FORMATS)}"
    )
    log_format: str = setting("text", "lines of the log: text or json")
    log_prompts: bool = setting(False, "write prompts to the log")
    page: bool = setting(True, "serve the page at /")
    otlp_endpoint: str | None = setting(
        None, "URL of an OpenTelemetry collector that gets a trace of each request"
    )
    served_model_name: str | None = setting(None, "name in /v1/models; None: the model's own")

    def __post_init__(self) -> None:
        require(is_count(self.port, 0) and self.port < 65536, "port", self.port, "from 0 to 65535")
        require_counts(self, "max_queue", "max_body", "max_completions", "max_documents")
        right = "a number of seconds above 0"
        for name in ("timeout", "drain_timeout"):
            value = getattr(self, name)
            good = value is None or (is_number(value) and value > 0)
            require(good, name, value, right)
        good = is_number(self.stream_interval) and 0 <= self.stream_interval <= 1
        require(good, "stream_interval", self.stream_interval, "seconds from 0 to 1")
        good = self.log_format in LOG_FORMATS
        require(good, "log_format", self.log_format, " or ".join(LOG_FORMATS))
        known = ("auto", *FORMATS)
        require(self.tool_parser in known, "tool_parser", self.tool_parser, f"one of {known}")
        require(all(self.api_key), "api_key", "", "at least one character")
        if not (self.api_key or self.insecure or is_local(self.host)):
            raise ConfigError(
                f"host {self.host!r} can be reached from other machines; give an api_key, or set "
                "insecure to run without access control"
            )


def is_local(host: str) -> bool:
    """Whether a host name can only mean this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
