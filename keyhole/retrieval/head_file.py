"""The folder of a retrieval head: its config and its tensors, without shared ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from keyhole.config import is_number
from keyhole.errors import ConfigError, ModelError
from keyhole.retrieval.checkpoint import HeadCheckpoint
from keyhole.retrieval.config import HeadConfig

#: `model_type` in the config.json of a head.
KIND = "keyhole_retrieval_head"
#: The entries of config.json besides the fields of HeadConfig.
_BESIDE = {"model_type", "dropped_share"}


def write(
    path: str | Path, config: HeadConfig, dropped_share: float | None, tensors: Mapping[str, Tensor]
) -> None:
    """Writes config.json and model.safetensors into the folder, replacing a head that is there.

    A folder that was left half-written has no config.json. ConfigError if it cannot be written.
    """
    folder = Path(path)
    text = {"model_type": KIND, **asdict(config), "dropped_share": dropped_share}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").unlink(missing_ok=True)
        weights, words = folder / "model.safetensors.part", folder / "config.json.part"
        plain = {name: x.detach().contiguous() for name, x in tensors.items()}
        save_file(plain, weights, metadata={"format": "pt"})
        words.write_text(json.dumps(text, indent=2) + "\n")
        weights.chmod(words.stat().st_mode & 0o777)  # safetensors makes files for the owner alone
        os.replace(weights, folder / "model.safetensors")
        os.replace(words, folder / "config.json")
    except OSError as error:
        raise ConfigError(f"the head cannot be written to {str(path)!r}: {error}") from error


def read_config(stored: HeadCheckpoint) -> tuple[HeadConfig, float | None]:
    """The config of a head and its dropped_share; ModelError if the folder is not a head's."""
    names = _BESIDE | {field.name for field in fields(HeadConfig)}
    if stored.config.get("model_type") != KIND:
        raise ModelError(
            f"{stored.name!r} holds no retrieval head: the model_type of its config.json is not "
            f"{KIND!r}; a draft model is read by RetrievalHead.from_eagle3"
        )
    for kind, wrong in (("lacks", names - set(stored.config)), ("has", set(stored.config) - names)):
        if wrong:
            raise ModelError(
                f"the config of head {stored.name!r} {kind} {', '.join(sorted(wrong))}; its fields "
                f"are {', '.join(sorted(names))}"
            )
    try:
        config = HeadConfig(**{n: x for n, x in stored.config.items() if n not in _BESIDE})
    except ConfigError as error:
        raise ModelError(f"the config of head {stored.name!r} cannot be: {error}") from error
    share = stored.config["dropped_share"]
    return config, float(share) if is_number(share) else None
