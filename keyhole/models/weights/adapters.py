"""LoRA adapters, read by peft: merged into the weights, or kept separately for single requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils.import_utils import is_peft_available

from keyhole.errors import ConfigError, ModelError, one_line
from keyhole.models import families
from keyhole.models.modules.sequence_adapters import AdapterMatrices


@dataclass(frozen=True)
class Adapters:
    """The LoRA adapters of a model, of which each request may name one.

    digests: of each adapter's weights, by name; the first adapter has number 1. layers: what the
    adapters add to each module, by the module's name.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, list[AdapterMatrices]] = field(default_factory=dict)

    def number(self, name: str | None) -> int:
        """The number of an adapter, 0 for None; KeyError for an unknown one."""
        return 0 if name is None else 1 + [*self.digests].index(name)


def merged(network: Any, adapter: Path, base: str) -> Any:
    """The network with a LoRA adapter in its weights; ModelError for one that does not fit."""
    _untie(network)
    adapted = _adapted(network, adapter, base)
    try:
        return adapted.merge_and_unload()
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"the adapter {str(adapter)!r} cannot be merged into the weights: {one_line(error)}; "
            "merge it with the program that made it, and give the folder of the result"
        ) from error


def _untie(network: Any) -> None:
    """Gives a tied output layer weights of its own: an adapter may change one of the two.

    peft adds to a weight in place, so that both would have changed.
    """
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if head is not None and head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        network.config.tie_word_embeddings = False


def read_adapters(network: Any, folders: Mapping[str, str | Path], base: str) -> Adapters:
    """The adapters in these folders, by name; the network is as before.

    ModelError for one that does not fit, or that changes more than linear layers of all tokens.
    """
    if not folders:
        return Adapters()
    if not is_peft_available():
        raise ModelError(
            "adapters= needs peft, which is not installed: pip install 'keyhole[lora]'"
        )
    if families.recurrent_layers(network.config):
        raise ConfigError(
            f"adapters= cannot be used with {base!r}, which has recurrent layers; give the folder "
            "of one adapter as the model, which merges it"
        )
    digests: dict[str, str] = {}
    layers: dict[str, list[AdapterMatrices]] = {}
    for number, (name, folder) in enumerate(folders.items(), 1):
        digest = hashlib.sha256()
        for place, part in _parts(network, number, Path(folder), base):
            layers.setdefault(place, []).append(part)
            digest.update(place.encode())
            for tensor in (part.down, part.up):
                digest.update(tensor.float().cpu().numpy().tobytes())
        digests[name] = digest.hexdigest()[:16]
    return Adapters(digests, layers)


def _parts(network: Any, number: int, folder: Path, base: str) -> list[tuple[str, AdapterMatrices]]:
    """What an adapter adds, by module name in a fixed order."""
    from peft.tuners.lora import LoraLayer

    adapted = _adapted(network, folder, base, alone=True)
    try:
        found = []
        layers: Iterable[tuple[str, Any]] = adapted.base_model.model.named_modules()
        for name, layer in (pair for pair in layers if isinstance(pair[1], LoraLayer)):
            _require_linear(network, name, layer, folder)
            down = layer.lora_A["default"].weight.detach().clone()
            up = layer.lora_B["default"].weight.detach() * layer.scaling["default"]
            found.append((name, AdapterMatrices(number, down, up)))
        return sorted(found, key=lambda pair: pair[0])
    finally:
        adapted.unload()


#: Ways to begin an adapter's training that take the adapter out of the base weights.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda")


def _require_plain(config: Any, folder: Path) -> None:
    """ModelError for an adapter that is more than low-rank products."""
    more = {
        "use_dora": "DoRA's magnitudes",
        "modules_to_save": "whole modules",
        "trainable_token_indices": "embeddings of tokens",
        "target_parameters": "single parameters",
        "lora_bias": "biases",
        "alora_invocation_tokens": "a beginning in the text (aLoRA)",
    }
    for name, what in more.items():
        if getattr(config, name, None):
            raise _unsuitable(folder, f"it has {what} ({name}) besides low-rank products")
    start = str(config.init_lora_weights).lower()
    if start.startswith(_CHANGES_BASE):
        why = f"its base weights are changed, too (init_lora_weights={start!r})"
        raise _unsuitable(folder, why)
    if config.bias != "none":
        raise _unsuitable(folder, f"it changes biases (bias={config.bias!r})")


def _require_linear(network: Any, name: str, layer: Any, folder: Path) -> None:
    """ModelError for a layer that does not compute one row for every token of a step."""
    kind = type(layer.get_base_layer())
    if not (issubclass(kind, nn.Linear) or kind.__name__ == "Conv1D"):
        raise _unsuitable(folder, f"it adapts {name}, which is of class {kind.__name__}")
    if "expert" in name or name.endswith("kv_b_proj"):
        raise _unsuitable(folder, f"it adapts {name}, which does not run once for every token")
    if layer.get_base_layer() is network.get_output_embeddings() or name.endswith("lm_head"):
        raise _unsuitable(folder, f"it adapts {name}, which runs for single tokens only")


def _unsuitable(folder: Path, why: str) -> ModelError:
    return ModelError(
        f"the adapter {str(folder)!r} cannot be chosen by single requests: {why}; give its folder "
        "as the model, which merges it"
    )


def _adapted(network: Any, adapter: Path, base: str, *, alone: bool = False) -> Any:
    """The network inside peft's model, with an adapter's weights; ModelError if it does not fit.

    alone: for single requests, which takes more of an adapter; the network must not change.
    """
    import peft

    try:
        config = peft.PeftConfig.from_pretrained(str(adapter))
        if config.peft_type != peft.PeftType.LORA:
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ModelError(
                f"the adapter {str(adapter)!r} is of the kind {kind}, which "
                "cannot be merged into weights; LORA can"
            )
        if alone:
            _require_plain(config, adapter)
        weights = peft.load_peft_weights(str(adapter), device="cpu")
        adapted = peft.get_peft_model(network, config)
        report: Any = peft.set_peft_model_state_dict(adapted, weights)
    except ModelError:
        raise
    except Exception as error:  # peft, safetensors, the file system
        raise ModelError(
            f"the adapter {str(adapter)!r} does not fit the model {base!r}: "
            f"{one_line(error)}; name its own base as base_model_name_or_path in "
            "its adapter_config.json"
        ) from error
    absent = [name for name in report.missing_keys if ".lora_" in name]
    wrong = sorted(absent) or sorted(report.unexpected_keys)
    if wrong:
        adapted.unload()
        raise ModelError(
            f"the adapter {str(adapter)!r} does not fit the model {base!r}, or is damaged: "
            f"{'it lacks' if absent else 'the model has no'} {wrong[0]}, and {len(wrong) - 1} more"
        )
    return adapted
