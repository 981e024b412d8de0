"""LoRA adapters, read by peft: merged into the weights, or kept separately for single requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_peft_available

from keyhole.config import is_count, is_number
from keyhole.errors import ConfigError, ModelError, one_line
from keyhole.models import families
from keyhole.models.locate import ADAPTER, ModelFiles, ignored_adapter
from keyhole.models.modules.sequence_adapters import AdapterMatrices
from keyhole.models.weights.stored import damage

#: The files that may hold an adapter's weights.
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
#: Before the name of every module in an adapter's file.
_ROOT = "base_model.model."


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


def require_applied(found: ModelFiles) -> None:
    """ModelError for a LoRA adapter that would be ignored, or applied to other weights."""
    if (found.has_adapter or found.adapter is not None) and not is_peft_available():
        raise ignored_adapter(found)
    if found.has_adapter and found.options.get("subfolder"):
        # Transformers would look in the model of the adapter for a folder of that name.
        raise ModelError(
            f"{found.name!r} has a LoRA adapter in subfolder {found.origin.subfolder!r}: download "
            "it, and give its folder"
        )


def merged(network: Any, adapter: Path, base: str) -> Any:
    """The network with a LoRA adapter in its weights; ModelError for one that does not fit."""
    was_tied = network.config.tie_word_embeddings
    adapted = _adapted(network, adapter, base)
    _unshare(adapted)
    bases = [
        (name, module.get_base_layer())
        for name, module in adapted.base_model.model.named_modules()
        if hasattr(module, "lora_A")
    ]
    try:
        found = adapted.merge_and_unload()
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"the adapter {str(adapter)!r} cannot be merged into the weights: {one_line(error)}; "
            "merge it with the program that made it, and give the folder of the result"
        ) from error
    for name, base_layer in bases:
        _require_finite(name, base_layer.parameters(), network.dtype, adapter)
    if was_tied:
        _tie(found)
    return found


def _unshare(adapted: Any) -> None:
    """Gives repeated layers a weight each: peft adds to it in place, once for each of them."""
    seen: set[int] = set()
    for module in adapted.modules():
        if not hasattr(module, "lora_A"):
            continue
        # Of experts in one tensor, peft adapts a parameter of another name.
        base, name = module.get_base_layer(), getattr(module, "parameter_name", "weight")
        weight = getattr(base, name)
        if id(weight) in seen:
            setattr(base, name, nn.Parameter(weight.detach().clone(), requires_grad=False))
        seen.add(id(weight))


def _untie(network: Any) -> bool:
    """Gives a tied output layer weights of its own: an adapter may change one of the two.

    peft adds to a weight in place, so that both would have changed. Returns whether it was tied.
    """
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    network.config.tie_word_embeddings = False
    return True


def _tie(network: Any) -> None:
    """Undoes `_untie` if the adapter has changed neither of the two, to hold their memory once."""
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if head is None or head.weight.device != embedding.weight.device:
        return
    if torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
        network.config.tie_word_embeddings = True


def _with_embeddings(
    network: Any, weights: dict[str, Tensor], adapter: Path, *, was_tied: bool
) -> dict[str, Tensor]:
    """An adapter's weights as peft reads them; the network is resized to the adapter's vocabulary.

    If tokens were added in training, peft stores the whole embedding and output layer. Those in
    `modules_to_save` are then stored three times, of which it reads one copy.
    """
    kept = {name: weight for name, weight in weights.items() if not _is_copy(name, weights)}
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    if head is None:
        return kept
    found = {module: f"{_ROOT}{name}." for name, module in network.named_modules()}
    places = found[embedding], found[head]
    if head.weight is embedding.weight:  # training one of them trains both
        kept = {n: w for n, w in kept.items() if not n.startswith(f"{places[1]}token_adapter.")}
    elif was_tied:
        for place, other in (places, places[::-1]):
            base = kept.get(f"{place}base_layer.weight")
            if base is not None and not _whole(kept, other):
                is_adapted = any(name.startswith(f"{other}lora_") for name in kept)
                kept[other + ("base_layer.weight" if is_adapted else "weight")] = base
    sizes = [[len(weight) for weight in _whole(kept, place)] for place in places]
    before, rows = len(embedding.weight), max(map(max, filter(None, sizes)), default=None)
    if rows is None or rows == before:
        return kept
    if rows > before and not all(sizes) and head.weight is not embedding.weight:
        raise ModelError(
            f"the adapter {str(adapter)!r} has {rows - before} tokens that its base lacks, but "
            "lacks an embedding or an output layer for them; save it again with "
            "save_embedding_layers=True"
        )
    network.resize_token_embeddings(rows, mean_resizing=False)
    return kept


def _is_copy(name: str, weights: Mapping[str, Tensor]) -> bool:
    """Whether a weight is one of those that peft stores beside the one that it reads."""
    module, _, copied = name.removesuffix(".weight").rpartition(".")
    return copied in ("modules_to_save", "original_module") and f"{module}.weight" in weights


def _whole(weights: Mapping[str, Tensor], place: str) -> list[Tensor]:
    """The whole matrices, not low-rank ones, that an adapter has of the module at a place."""
    names = (name for name in weights if name.startswith(place) and name.endswith(".weight"))
    return [weights[name] for name in names if ".lora_" not in name]


def read_adapters(network: Any, folders: Mapping[str, str | Path], base: str) -> Adapters:
    """The adapters in these folders, by name; the network is as before.

    ModelError for one that does not fit, or that changes more than linear layers of all tokens.
    """
    if not folders:
        return Adapters()
    given: Any = folders
    if not (
        isinstance(given, Mapping)
        and all(isinstance(one, str | Path) and str(one) for one in given.values())
    ):
        raise ConfigError(f"adapters {given!r} must be folders by name, such as {{'sql': FOLDER}}")
    if not is_peft_available():
        raise ModelError(
            "adapters= needs peft, which is not installed: pip install 'keyhole[lora]'"
        )
    if families.recurrent_layers(network.config):
        raise ConfigError(
            f"adapters= cannot be used with {base!r}, which has recurrent layers; to merge one "
            "adapter, give its folder as the model"
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
            _require_finite(name, (down, up), network.dtype, folder)
            found.append((name, AdapterMatrices(number, down, up)))
        return sorted(found, key=lambda pair: pair[0])
    finally:
        adapted.unload()


#: Ways to begin an adapter's training that take the adapter out of the base weights.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda")


def _require_scale(config: Any, folder: Path) -> None:
    """ModelError for a field that does not say how much the products of an adapter count.

    peft takes a scale of NaN, and every text as true, also "false".
    """
    for name, by_module, good, right in (
        ("r", "rank_pattern", is_count, "a whole number >= 1"),
        ("lora_alpha", "alpha_pattern", is_number, "a finite number"),
    ):
        pattern = getattr(config, by_module)
        if not isinstance(pattern, dict):
            raise _wrong_field(folder, by_module, pattern, "numbers by module")
        named = {f"{by_module} of {module}": value for module, value in pattern.items()}
        for field_name, value in {name: getattr(config, name), **named}.items():
            if not good(value):
                raise _wrong_field(folder, field_name, value, right)
    if not isinstance(config.use_rslora, bool):
        raise _wrong_field(folder, "use_rslora", config.use_rslora, "true or false")


def _wrong_field(folder: Path, name: str, value: object, right: str) -> ModelError:
    return ModelError(
        f"the adapter {str(folder)!r} is damaged: {name} {value!r} in its {ADAPTER} must be "
        f"{right}; correct it, or download it again"
    )


def _require_plain(config: Any, folder: Path) -> None:
    """ModelError for an adapter that is more than low-rank products."""
    more = {
        "use_dora": "DoRA's magnitudes",
        "modules_to_save": "whole modules",
        "trainable_token_indices": "embeddings of tokens",
        "target_parameters": "single parameters",
        "lora_bias": "biases",
        "alora_invocation_tokens": "a beginning in the text (aLoRA)",
        "use_bdlora": "blocks of matrices (BD-LoRA)",
        "kasa_config": "singular values (KaSA)",
        "layer_replication": "repeated layers",
    }
    for name, what in more.items():
        if getattr(config, name, None):
            raise _unsuitable(folder, f"it has {what} ({name}) besides low-rank matrices")
    start = str(config.init_lora_weights).lower()
    if start.startswith(_CHANGES_BASE):
        why = f"it also changes the base weights (init_lora_weights={start!r})"
        raise _unsuitable(folder, why)
    if config.bias != "none":
        raise _unsuitable(folder, f"it changes biases (bias={config.bias!r})")


def _low_rank(weights: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """An adapter's low-rank parts; ModelError if it has weights in place of the network's.

    They would be there for all requests. Those of a layer that it adapts are the network's own.
    """
    kept = {name: weight for name, weight in weights.items() if ".base_layer." not in name}
    other = next((name for name in sorted(kept) if ".lora_" not in name), None)
    if other is not None:
        raise _unsuitable(folder, f"it has {other.removeprefix(_ROOT)} besides low-rank matrices")
    return kept


def _require_linear(network: Any, name: str, layer: Any, folder: Path) -> None:
    """ModelError for a layer that does not compute one row for every token of a step."""
    kind = type(layer.get_base_layer())
    linear = issubclass(kind, nn.Linear) or kind.__name__ == "Conv1D"
    if not linear or kind.__name__.endswith("Router"):  # one that returns a tuple
        raise _unsuitable(folder, f"it adapts {name}, which is of class {kind.__name__}")
    if "expert" in name or name.endswith("kv_b_proj"):
        raise _unsuitable(folder, f"it adapts {name}, which does not run once for every token")
    if layer is network.get_output_embeddings() or "lm_head" in name.split("."):
        raise _unsuitable(folder, f"it adapts {name}, which runs for single tokens only")


def _require_finite(
    name: str, matrices: Iterable[Tensor], dtype: torch.dtype, folder: Path
) -> None:
    """ModelError for NaN or infinite numbers; of one adapter, all rows of a step would get them."""
    if not all(bool(matrix.to(dtype).isfinite().all()) for matrix in matrices):
        raise ModelError(
            f"the adapter {str(folder)!r} is damaged: {name} has NaN or infinite numbers in "
            f"{str(dtype).removeprefix('torch.')}; train or download it again"
        )


def _unsuitable(folder: Path, why: str) -> ModelError:
    return ModelError(
        f"the adapter {str(folder)!r} cannot be applied to single requests: {why}; to merge it, "
        "give its folder as the model"
    )


def _adapted(network: Any, adapter: Path, base: str, *, alone: bool = False) -> Any:
    """The network inside peft's model, with an adapter's weights; ModelError if it does not fit.

    alone: for single requests, which takes more of an adapter; the network must not change.
    """
    import peft

    config, weights = _read(adapter)
    try:
        if config.peft_type != peft.PeftType.LORA:
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ModelError(
                f"the adapter {str(adapter)!r} is of type {kind}, which cannot be merged into the "
                "weights; only LORA can"
            )
        _require_scale(config, adapter)
        if alone:
            _require_plain(config, adapter)
            weights = _low_rank(weights, adapter)
        else:
            # Tokens that are trained alone are those of both of two tied layers.
            was_tied = not config.trainable_token_indices and _untie(network)
            weights = _with_embeddings(network, weights, adapter, was_tied=was_tied)
        adapted = peft.get_peft_model(network, config)
        report: Any = peft.set_peft_model_state_dict(adapted, weights)
    except ModelError:
        raise
    except Exception as error:  # peft
        raise ModelError(
            f"the adapter {str(adapter)!r} does not fit the model {base!r}: {one_line(error)}; "
            f"correct its {ADAPTER}, where base_model_name_or_path names the base that it fits"
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


def _read(adapter: Path) -> tuple[Any, dict[str, Tensor]]:
    """The config and the weights in an adapter's folder; ModelError if they cannot be read."""
    import peft

    try:
        config = peft.PeftConfig.from_pretrained(str(adapter))
        return config, peft.load_peft_weights(str(adapter), device="cpu")
    except Exception as error:  # peft, safetensors, the file system
        raise ModelError(f"the adapter {str(adapter)!r} {_why_unread(adapter, error)}") from error


def _why_unread(adapter: Path, error: Exception) -> str:
    """What is wrong with an adapter's files, and what helps."""
    if not (adapter / ADAPTER).is_file():
        return f"is missing: there is no {ADAPTER} in that folder"
    if not any(map(any, map(adapter.glob, _WEIGHTS))):
        return f"cannot be loaded: {_WEIGHTS[0]} is missing: download it"
    broken = damage(adapter)
    if broken is not None:
        return f"cannot be loaded: {broken}"
    return f"cannot be loaded: {one_line(error)}; download its {ADAPTER} and its weights again"
