"""The counters in vLLM's metrics (`/metrics`) and in its log.

vLLM's frontend calls each engine's logger once per step, and every few seconds for a log line; ours
reads the file that the worker writes (`counters`).
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from prometheus_client import Gauge
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from keyhole.integrations.vllm.counters import read_counters

logger = init_logger("vllm.keyhole")

#: Environment variable for the folder of the counters' files. The frontend creates the folder; its
#: engine and worker processes inherit the variable.
_FOLDER = "KEYHOLE_VLLM_COUNTERS"


def share_counters() -> None:
    """Creates the folder through which a new engine's workers report; it is removed when this
    process ends.
    """
    if multiprocessing.parent_process() is not None and _FOLDER in os.environ:
        return  # one of several API servers: their parent made the folder
    folder = tempfile.mkdtemp(prefix="keyhole-vllm-")
    os.environ[_FOLDER] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def counters_path(config: VllmConfig, engine: int | None = None) -> Path | None:
    """The file of an engine's counters; engine: its number, None for that of this process.

    None if no frontend of this machine created a folder.
    """
    folder = os.environ.get(_FOLDER)
    if folder is None or not Path(folder).is_dir():
        return None
    number = config.parallel_config.data_parallel_index if engine is None else engine
    return Path(folder) / str(number)


class KeyholeStatLogger(StatLoggerBase):
    """Gauges in addition to vLLM's own, and a line in its log."""

    _gauges: dict[str, Gauge] | None = None

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._path, self._engine = counters_path(vllm_config, engine_index), str(engine_index)
        if KeyholeStatLogger._gauges is None:
            KeyholeStatLogger._gauges = _make_gauges()
        self._logged_rows = 0.0

    def record(self, *_: Any, **__: Any) -> None:
        """Updates the gauges."""
        counts = None if self._path is None else read_counters(self._path)
        if counts is None or self._gauges is None:
            return
        for name, gauge in self._gauges.items():
            value = getattr(counts, name)
            if value is not None:
                gauge.labels(self._engine).set(value)

    def log(self) -> None:
        """One line, if tokens were decoded since the last."""
        counts = None if self._path is None else read_counters(self._path)
        if counts is None or counts.rows == self._logged_rows:
            return
        self._logged_rows = counts.rows
        logger.info(
            "Engine %s: Keyhole read %.1f %% of the keys in %d decoded tokens, %d sparse layers",
            self._engine,
            100 * (counts.attended_fraction or 0.0),
            counts.rows,
            counts.sparse_layers,
        )

    def log_engine_initialized(self) -> None:
        """Does nothing: the workers log which layers are sparse."""


def _make_gauges() -> dict[str, Gauge]:
    """Makes the gauges. Their names do not contain "vllm", because vLLM removes such metrics from
    the registry when an engine starts.
    """
    meaning = {
        "attended_fraction": "share of the keys that decode steps read, over full-attention layers",
        "keys_read": "keys read by decode steps, summed over tokens and full-attention layers",
        "keys_there": "keys that dense steps would have read",
        "pages_chosen": "pages chosen, summed over decoded tokens and sparse layers",
        "rows": "tokens decoded under the policy",
        "sparse_layers": "layers that read selected pages",
    }
    return {
        name: Gauge(f"keyhole:{name}", text, ["engine"], multiprocess_mode="mostrecent")
        for name, text in meaning.items()
    }
