"""Settings that a policy cannot have are refused by name, with the value and what is right."""

from __future__ import annotations

from typing import Any

import pytest

from keyhole.errors import ConfigError
from keyhole.policies import make_policy
from tests.policies.shapes import shape

#: By policy, with the messages.
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "quest": [
        ({"token_budget": 15}, "token_budget 15 must be at least one page of 16"),
        ({"full_layers": (-1,)}, "full_layers"),
    ],
    "seer_attention_r": [
        ({"token_budget": 15}, "token_budget 15 must be at least one page of 16"),
        ({"full_layers": (-1,)}, "full_layers"),
    ],
    "random": [
        ({"token_budget": 4, "sink_size": 4}, "token_budget"),
        ({"sink_size": -1}, "sink_size"),
        ({"seed": -1}, "seed"),
    ],
    "delta": [
        ({"token_budget": 15}, "token_budget"),
        ({"recent_pages": 0}, "recent_pages"),
        ({"recent_pages": 65}, "recent_pages 65 must be from 1 to 64"),
        ({"recent_pages": "x"}, "recent_pages"),
        ({"sink_size": -1}, "sink_size -1"),
        (
            {"token_budget": 64, "sink_size": 17, "recent_pages": 3},
            "at least 80: sink_size 17 and 3 recent_pages of 16",
        ),
        ({"recall": 0.9, "sink_size": 1, "min_budget": 128}, "min_budget 128 must be from 144"),
        ({"delta_layers": (28,)}, "delta_layers"),
        ({"delta_layers": (-1,)}, "delta_layers"),
        ({"full_layers": (-1,)}, "full_layers"),
        ({"full_layers": ("x",)}, "full_layers"),
        ({"layers": "somewhere.json", "full_layers": (0,)}, "either layers"),
        ({"layers": "nowhere.json"}, "nowhere.json"),
        ({"recall": 0}, "recall 0 must be a share"),
        ({"recall": 1.0}, "recall 1.0 must be a share"),
        ({"recall": "x"}, "recall 'x'"),
        ({"recall": float("nan")}, "recall nan"),
        ({"min_budget": 64}, "min_budget 64 must be None without recall"),
        ({"recall": 0.9, "min_budget": 100}, "min_budget 100 must be from 128"),
        ({"recall": 0.9, "min_budget": 1025}, "min_budget 1025 must be .* 1024"),
    ],
    "tidal_decode": [
        ({"token_budget": 0}, "token_budget 0 must be at least 1"),
        ({"selection_layers": (28,)}, "selection_layers"),
        ({"selection_layers": ("x",)}, "selection_layers"),
        ({"selection_layers": 3}, "selection_layers"),
        ({"full_layers": (-1,)}, "full_layers"),
        ({"full_layers": None}, "full_layers"),
    ],
    "omnikv": [
        ({"token_budget": 0}, "token_budget 0 must be at least 1"),
        ({"filter_layers": (28,)}, "filter_layers"),
        ({"filter_layers": ("x",)}, "filter_layers"),
        ({"full_layers": (-1,)}, "full_layers"),
        ({"dense_after": -1}, "dense_after -1 must be at least 0"),
        ({"dense_after": "x"}, "dense_after 'x'"),
    ],
    "infllm": [
        ({"token_budget": 15}, "token_budget 15 must be at least one page of 16"),
        (
            {"token_budget": 32},
            "token_budget 32 must be at least 48: sink_size 4 and window_size",
        ),
        ({"block_size": 24}, "block_size 24 must be a multiple of the page size 16"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 2048}, "block_size 2048 must be .* up to token_budget 1024"),
        ({"window_size": 0}, "window_size"),
        ({"window_size": 1000}, "token_budget 1024 must be at least 1088"),
        ({"sink_size": -1}, "sink_size"),
        ({"full_layers": 2}, "full_layers"),
        ({"sink_size": 1000}, "token_budget 1024 must be at least 1088"),
        ({"num_representatives": 0}, "num_representatives 0 must be from 1 to block_size 64"),
        ({"num_representatives": 65}, "num_representatives 65 must be from 1 to block_size 64"),
    ],
    "raas": [
        ({"token_budget": 15}, "token_budget 15 must be at least one page of 16"),
        ({"alpha": -0.1}, "alpha -0.1 must be a number from 0 to below 1"),
        ({"alpha": 1}, "alpha"),
        ({"alpha": "x"}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
    ],
    "r_kv": [
        ({"token_budget": 15}, "token_budget 15 must be at least one page of 16"),
        (
            {"observation_window": 17},
            "observation_window 17 must be from 1 to the page size 16",
        ),
        ({"mix_lambda": 1.5}, "mix_lambda 1.5 must be a number from 0 to 1"),
        ({"kernel_size": 2}, "kernel_size 2 must be an odd number"),
        ({"threshold": 2}, "threshold 2 must be a cosine"),
    ],
    "snapkv": [
        ({"token_budget": 1}, "token_budget 1 must be at least 2"),
        (
            {"token_budget": 8, "observation_window": 8},
            "observation_window 8 must be from 1 to below",
        ),
        ({"kernel_size": 4}, "kernel_size 4 must be an odd number"),
        ({"pooling": "sum"}, "pooling 'sum' must be avg or max"),
        ({"full_layers": (28,)}, "full_layers"),
    ],
    "clusterkv": [
        ({"token_budget": 0}, "token_budget 0 must be at least 1"),
        ({"cluster_size": 0}, "cluster_size 0 must be at least 1"),
        ({"sink_size": -1}, "sink_size -1 must be at least 0"),
        ({"cluster_every": 0}, "cluster_every 0 must be at least 1"),
        ({"token_budget": 300, "cluster_every": 290}, "token_budget 300 must be at least 306"),
        ({"full_layers": 2}, "full_layers"),
        ({"window_size": 0}, "window_size 0 must be at least 1"),
        ({"num_clusters": 0}, "num_clusters 0 must be at least 1"),
        (
            {"generated": "beside"},
            "generated 'beside' must be one of counted, recent_beside, all",
        ),
        ({"window_size": 1010}, "must be at least 1026: sink_size 16 and window_size 1010"),
    ],
    "shadowkv": [
        ({"token_budget": 15}, "token_budget 15 must be at least 2 chunks of 8"),
        ({"chunk_size": 5}, "chunk_size 5 must be a divisor of the page size 16"),
        ({"chunk_size": 32}, "chunk_size 32 must be a divisor"),
        ({"outlier_chunks": -1}, "outlier_chunks -1 must be at least 0"),
        ({"window_size": 0}, "window_size 0 must be at least 1"),
        ({"sink_size": -1}, "sink_size -1 must be at least 0"),
        ({"sink_size": 601}, "must be at least 1032: 76 first, 48 outlier, 4 newest"),
        ({"full_layers": 2}, "full_layers"),
        ({"outlier_chunks": 124}, "token_budget 1024 must be at least 1032"),
        ({"rank": -1}, "rank -1 must be from 0 to 4"),
        ({"rank": 5}, "rank 5 must be from 0 to 4"),
    ],
}


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [(name, *case) for name, cases in WRONG.items() for case in cases],
)
def test_wrong_settings_are_refused(name: str, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_policy(name, settings).resolve(shape(28))


@pytest.mark.parametrize(
    ("name", "setting", "named"),
    [
        ("delta", "delta_layers", "delta_layers"),
        (
            "tidal_decode",
            "selection_layers",
            r"selection_layers \(4,\) must be full-attention layers",
        ),
        ("omnikv", "filter_layers", r"filter_layers \(4,\) must be full-attention layers"),
    ],
)
def test_a_sliding_layer_cannot_choose(name: str, setting: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_policy(name, {setting: (4,)}).resolve(shape(8, full=(1, 3, 5, 7)))
