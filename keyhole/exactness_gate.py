"""Measures once per family whether the engine computes what transformers computes.

There is no list of families. A small random model of the same class, with the same kinds of layers,
runs through the engine and through transformers' eager attention: texts of several lengths at once,
prompts in chunks, decode steps past every window. The verdict is kept in the user's cache folder,
per config, transformers and Keyhole. `keyhole verify` compares the real weights.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from keyhole.config import EngineConfig, SamplingParams
from keyhole.engine.engine import Engine
from keyhole.errors import ConfigError, KeyholeError, ModelError, UnknownNameError, one_line
from keyhole.models import families
from keyhole.models.device_map import DeviceMap
from keyhole.models.loading import adopt, load, require_own
from keyhole.models.locate import Origin
from keyhole.models.model import Model
from keyhole.models.model_config import is_remote, text_part
from keyhole.models.shrink import random_model, shrink
from keyhole.policies.controls import Full

#: Largest difference of logits, in units of their standard deviation. Exact families differ by
#: about 1e-5, from the order of sums; wrong ones by more than 0.1.
TOLERANCE = 1e-3
#: Prompt lengths: shorter than, as long as and longer than a page and a window.
_LENGTHS = (5, 37, 18, 16)
_GENERATED = 10
_PAGE_SIZE = 8
_CHUNK = 9
_CACHE_BYTES = 64 << 20


@dataclass(frozen=True)
class Exactness:
    """Whether a family is exact.

    error: largest difference of logits / their standard deviation; None if it could not be run.
    reason: why it is refused; None for an exact one.
    """

    family: str
    error: float | None
    reason: str | None = None

    @property
    def exact(self) -> bool:
        """Whether the engine may run it."""
        return self.reason is None


def require(config: Any, name: str) -> str | None:
    """ModelError unless the engine is exact for models of this config.

    The first time for a family this takes about a second; a line that says so is logged and
    returned. None where the verdict was known.
    """
    verdict, measured_now = _known(config, name)
    if not verdict.exact:
        raise ModelError(
            f"model {name!r} belongs to the family {verdict.family!r}, which Keyhole cannot run: "
            f"{verdict.reason}; `keyhole models` lists the supported families"
        )
    if not measured_now:
        return None
    line = (
        f"family {verdict.family}: exact (the logits of a small random model differ from those of "
        f"transformers' eager attention by {verdict.error:.0e} standard deviations)"
    )
    logging.getLogger("keyhole").info(line)
    return line


def load_exact(
    model: str | Path | PreTrainedModel | Model,
    tokenizer: Any,
    device: str | torch.device,
    dtype: str | torch.dtype,
    weights: str | None,
    adapters: Mapping[str, str | Path] | None,
    device_map: DeviceMap = None,
    origin: Origin | None = None,
) -> Model:
    """The model of an `LLM`, for its arguments; ModelError for a family that is not exact."""
    if device_map is not None and isinstance(model, PreTrainedModel | Model):
        raise ConfigError(
            "device_map= needs the name of a model, because it takes effect while the model is "
            "loaded; this one is already loaded"
        )
    origin = origin or Origin()
    if origin != Origin() and isinstance(model, PreTrainedModel | Model):
        raise ConfigError(
            "revision=, subfolder= and trust_remote_code= need the name of a model; this one is "
            "already loaded"
        )
    if isinstance(model, PreTrainedModel):
        return adopt(model, tokenizer, device, dtype, require, weights, adapters)
    if not isinstance(model, Model):
        return load(model, device, dtype, tokenizer, require, weights, adapters, device_map, origin)
    if weights is not None:
        raise ConfigError(
            f"weights {weights!r} must be given to keyhole.models.loading.load, because this "
            "model is already loaded"
        )
    if adapters is not None:
        raise ConfigError(
            "adapters= must be given to keyhole.models.loading.load, because this model is "
            "already loaded"
        )
    if tokenizer is not None:
        raise ConfigError(
            "tokenizer= must be given to keyhole.models.loading.load, because this model is "
            "already loaded"
        )
    require_own(device, dtype, model.device, model.dtype)
    return model


def measure(config: Any, name: str = "this model") -> Exactness:
    """Compares a small random model of this config's kind with transformers, in float32."""
    family = str(config.model_type)
    try:
        families.check(config, name)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")
            error = _difference(config)
    except KeyholeError as refused:
        return Exactness(family, None, str(refused))
    except Exception as failed:  # noqa: BLE001 - any error of a family's code is a refusal
        return Exactness(family, None, f"a small model fails with {one_line(failed)}")
    if error < TOLERANCE:
        return Exactness(family, error)
    return Exactness(
        family, error, f"logits differ from transformers' by {error:.1g} standard deviations"
    )


#: Fields without which a family's default config describes no model.
_EXAMPLES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    # Its modules read a base of RoPE that the default config lacks.
    "dbrx": {"attn_config": {"kv_n_heads": 4, "rope_theta": 5e5, "clip_qkv": 2}},
    # Hybrids whose default has one kind of layers only.
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
}


def families_of_transformers() -> list[str]:
    """`model_type` of every family of the installed transformers that generates text."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def require_family(family: str) -> None:
    """UnknownNameError for a `model_type` of no family that generates text."""
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or family not in CONFIG_MAPPING:
        raise UnknownNameError("family", family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def measure_family(family: str) -> Exactness:
    """The verdict of a family's default config; UnknownNameError for an unknown `model_type`."""
    require_family(family)
    with _quiet():
        try:
            config = text_part(CONFIG_MAPPING[family](**_EXAMPLES.get(family, {})))
        except Exception as failed:  # noqa: BLE001 - a config that cannot stand alone
            return Exactness(family, None, f"its default config fails: {one_line(failed)}")
        verdict, _ = _known(config, family)
    return dataclasses.replace(verdict, family=family)


def _difference(config: Any) -> float:
    """Of logits, largest, in units of their standard deviation; NaN becomes infinity."""
    small = shrink(config)
    small._attn_implementation = "eager"
    network = random_model(small)
    generator = torch.Generator().manual_seed(3)
    texts = [
        torch.randint(1, small.vocab_size, (length + _GENERATED,), generator=generator).tolist()
        for length in _LENGTHS
    ]
    # Shorter ones first, and each with the token that could still follow it: the frequencies of
    # some RoPE follow the longest text so far.
    with torch.no_grad():
        by_length = sorted(texts, key=len)
        logits = {len(text): network(torch.tensor([[*text, 1]])).logits[0] for text in by_length}
    wanted = [logits[len(text)][-_GENERATED - 2 : -1] for text in texts]
    found = _by_engine(network, texts)
    scale = max(float(logits.std()) for logits in wanted)
    largest = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) / scale
    return largest if largest == largest else float("inf")


def _by_engine(network: Any, texts: list[list[int]]) -> list[Tensor]:
    """Logits after each prompt and each token that follows it."""
    settings = EngineConfig(
        page_size=_PAGE_SIZE,
        prefill_chunk=_CHUNK,
        memory=_CACHE_BYTES,
        max_batch=len(texts),
        prefix_cache=False,  # the texts have nothing in common
    )
    engine = Engine(adopt(network, device="cpu"), Full(), settings)
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0)
    sequences = [
        engine.add(text[:-_GENERATED], params, given=text[-_GENERATED:], keep_logits=True)
        for text in texts
    ]
    while engine.has_work:
        engine.step()
    return [torch.stack(sequence.logits) for sequence in sequences]


class _quiet:  # noqa: N801 - reads as a word after `with`
    """Without transformers' messages about the small model."""

    def __enter__(self) -> None:
        self._level = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()

    def __exit__(self, *_: object) -> None:
        transformers.logging.set_verbosity(self._level)


def _known(config: Any, name: str) -> tuple[Exactness, bool]:
    """The verdict, and whether it was measured now."""
    if is_remote(config):  # its code may change under the same name
        return measure(config, name), True
    try:
        families.check(config, name)
        key = _digest(shrink(config))
    except Exception:  # noqa: BLE001 - `measure` says what is wrong
        return measure(config, name), True
    kept = _stored(key)
    return (_measured(key, config, name), True) if kept is None else (kept, False)


@functools.cache
def _stored(key: str) -> Exactness | None:
    try:
        return Exactness(**json.loads(_path(key).read_text()))
    except (OSError, ValueError, TypeError):  # none, or damaged: measured again
        return None


def _measured(key: str, config: Any, name: str) -> Exactness:
    verdict = measure(config, name)
    if verdict.error is None:  # it failed, perhaps for lack of memory: measured again next time
        return verdict
    _stored.cache_clear()
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(verdict)))
        partial.replace(path)
    except OSError:  # a read-only home: measured again next time
        pass
    return verdict


def _digest(config: Any) -> str:
    """A digest of what may change the verdict: the small config without its name, and versions."""
    fields = config.to_dict()
    for name in ("_name_or_path", "architectures", "dtype", "quantization_config"):
        fields.pop(name, None)
    versions = (metadata.version("keyhole"), transformers.__version__, torch.__version__)
    text = json.dumps([fields, versions], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _path(key: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "keyhole" / "exactness" / f"{key}.json"
