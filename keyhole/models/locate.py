"""Locates a model: the bundled one, a folder, or the hub with its local cache. No torch here.

A GGUF file holds a whole model; a LoRA adapter is merged into the model that it was trained for.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import (
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    is_offline_mode,
    list_repo_files,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from keyhole.errors import ConfigError, ModelError, UnknownNameError, one_line

#: The name of the bundled model; a folder of this name is "./tiny".
TINY = "tiny"
TINY_FOLDER = Path(__file__).parent / "tiny" / "keyhole-tiny"
#: A second one for comparisons: of the same world, and resolves two facts in one step.
TINY_HOPS = "tiny-hops"
_BUNDLED = {TINY: TINY_FOLDER, TINY_HOPS: TINY_FOLDER.with_name("keyhole-hops")}


def named(model: object) -> str:
    """A folder or hub id as text; a bundled model's folder for its name, which is no `Path`.

    ConfigError for an invalid name: None, empty text, an object.
    """
    if not isinstance(model, str | Path) or not str(model).strip():
        what = repr(model) if model is None or isinstance(model, str) else type(model).__name__
        raise ConfigError(
            f"model {what} must be a folder, a hub id such as 'meta-llama/Llama-3.2-1B', or "
            f"{TINY!r} for the bundled demonstration model"
        )
    if isinstance(model, Path) and str(model) in _BUNDLED:
        return f"./{model}"  # pathlib has dropped the "./" that a user wrote
    return str(_BUNDLED.get(str(model), model))


def bundled_name(model: str | Path) -> str | None:
    """The name of a bundled model, given by its name or its folder; None for any other."""
    folder = Path(named(model)).resolve()
    return next((name for name, own in _BUNDLED.items() if own.resolve() == folder), None)


def is_tiny(model: str | Path) -> bool:
    """Whether this is a bundled model, by its name or its folder."""
    return bundled_name(model) is not None


ADAPTER = "adapter_config.json"
_CONFIG = "config.json"
#: A model's own weights, or the index of them.
_WEIGHTS = ("model*.safetensors*", "pytorch_model*.bin*")
#: Every tokenizer has at least one of them.
_TOKENIZER_FILES = ("*token*", "vocab*", "merges.txt", "*.model")

#: Seconds to wait for the hub before using the local cache alone.
_PATIENCE = 2.0

# As llama.cpp names the parts of a model.
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


@dataclass(frozen=True)
class Origin:
    """Which files of a model are meant, and whether code among them may run.

    revision: a branch, tag or commit of a hub id; None: its main branch. subfolder: the folder of
    the model inside it; None: the top. trust_remote_code: whether Python files of the model are
    run, for families that transformers does not have. ConfigError for a wrong one.
    """

    revision: str | None = None
    subfolder: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name, value in (("revision", self.revision), ("subfolder", self.subfolder)):
            if value is not None and not (isinstance(value, str) and value.strip()):
                raise ConfigError(f"{name} must be text that is not empty, not {value!r}")
        if not isinstance(self.trust_remote_code, bool):  # "false" would be true
            raise ConfigError(
                f"trust_remote_code must be True or False, not {self.trust_remote_code!r}"
            )
        inside = Path(self.subfolder or ".")
        if inside.is_absolute() or ".." in inside.parts:
            raise ConfigError(
                f"subfolder must be a folder inside the model's, not {self.subfolder!r}"
            )

    def place_of(self, file: str) -> str:
        """The path of a file of the model, from the top."""
        return file if self.subfolder is None else f"{self.subfolder.strip('/')}/{file}"


_MAIN = Origin()


@dataclass(frozen=True)
class ModelFiles:
    """A model's files. name: a folder or a hub id. config: its config.json, or its GGUF file.

    unreachable: why the hub did not answer, so that only its local cache is used; None: it did.
    has_adapter: there is a LoRA adapter next to the weights. gguf: the GGUF file in the folder that
    holds config, weights and tokenizer; None: they are in files of their own. adapter: the folder
    of a LoRA adapter that is merged into these weights. origin: as it was given to `locate`; with
    an adapter, that of its model.
    """

    name: str
    config: Path
    unreachable: str | None
    has_adapter: bool
    gguf: str | None = None
    adapter: Path | None = None
    origin: Origin = _MAIN

    @property
    def shown(self) -> str:
        """What messages call it: the folder, the hub id, the GGUF file, or the adapter."""
        if self.adapter is not None:
            return str(self.adapter)
        return self.name if self.gguf is None else str(self.config)

    @property
    def of_adapter(self) -> ModelFiles:
        """The folder of the adapter, which may have a tokenizer of its own."""
        assert self.adapter is not None
        name, config = str(self.adapter), self.adapter / _CONFIG
        return replace(self, name=name, config=config, gguf=None, adapter=None)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of every `from_pretrained` of transformers; it would ask about remote code."""
        found: dict[str, Any] = {
            "local_files_only": self.unreachable is not None,
            "trust_remote_code": self.origin.trust_remote_code,
        }
        if self.gguf is not None:
            return found | {"gguf_file": self.gguf}
        if Path(self.name).is_dir():
            return found
        if self.origin.revision is not None:
            found["revision"] = self.origin.revision
        return found | {"subfolder": self.origin.subfolder or ""}


def locate(model: str | Path, origin: Origin = _MAIN) -> ModelFiles:
    """The place of a model given by "tiny", a folder or a hub id.

    ConfigError for an invalid name, and for a revision of anything but a hub id; ModelError, with
    the cause, for a model that is not found.
    """
    name = named(model)
    folder = Path(name)
    if origin.revision is not None and (folder.exists() or name.lower().endswith(".gguf")):
        raise ConfigError(
            f"revision {origin.revision!r} is for a hub id, but {name!r} is on this machine; leave "
            "it out"
        )
    if origin.subfolder is not None and (folder.is_file() or name.lower().endswith(".gguf")):
        raise ConfigError(
            f"subfolder {origin.subfolder!r} is for a folder, but {name!r} is a file; leave it out"
        )
    found = _located(name, origin)
    # The model that an adapter is for has a place of its own.
    return found if found.adapter is not None else replace(found, origin=origin)


def _located(name: str, origin: Origin) -> ModelFiles:
    folder = Path(name)
    if origin.subfolder is not None and folder.is_dir():
        folder /= origin.subfolder
        name = str(folder)
        if not folder.is_dir():
            raise ModelError(f"there is no folder {name!r}{_nearest(folder)}")
    if name.lower().endswith(".gguf") and not folder.is_dir():
        return _in_gguf(folder)
    if folder.is_file():
        raise ModelError(f"{name!r} is a file; give the folder of a model, where its {_CONFIG} is")
    if not folder.is_dir():
        return _on_hub(name, origin)
    weights = any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs and not weights:
        if len(ggufs) > 1:
            files = ", ".join(path.name for path in ggufs)
            raise ModelError(f"folder {name!r} holds several GGUF files: name one of {files}")
        return _in_gguf(ggufs[0])
    has_config, has_adapter = ((folder / file).is_file() for file in (_CONFIG, ADAPTER))
    # A training may leave the config of the model beside the adapter.
    if has_adapter and not (has_config and any(map(any, map(folder.glob, _WEIGHTS)))):
        return _base_of(folder, origin)
    if not has_config:
        raise ModelError(f"folder {name!r} holds no model: it has no {_CONFIG}")
    return ModelFiles(name, folder / _CONFIG, None, has_adapter)


def _base_of(adapter: Path, origin: Origin) -> ModelFiles:
    """The model that an adapter was trained for, and the adapter.

    The subfolder that was given is the adapter's; peft writes the revision of the model.
    """
    path = adapter / ADAPTER
    try:
        written = json.loads(path.read_text())
        base, revision = written["base_model_name_or_path"], written.get("revision")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{str(path)!r} does not name the base model of the adapter: {one_line(error)}"
        ) from error
    if base == str(adapter):
        raise ModelError(f"{str(path)!r} names its own folder as the base model")
    try:
        revision = None if Path(named(base)).exists() else revision
        found = locate(base, replace(origin, revision=revision, subfolder=None))
    except (ConfigError, ModelError) as error:
        raise ModelError(
            f"the base model {base!r} of the adapter {str(adapter)!r} cannot be found: {error}; "
            f"correct base_model_name_or_path in its {ADAPTER}"
        ) from error
    if found.has_adapter or found.adapter is not None:
        raise ModelError(
            f"the base model {base!r} of the adapter {str(adapter)!r} is an adapter, too"
        )
    return replace(found, adapter=adapter)


def _in_gguf(path: Path) -> ModelFiles:
    if not path.is_file():
        raise ModelError(f"there is no file {str(path)!r}{_nearest(path, '*.gguf')}")
    if _PART.search(path.name):
        raise ModelError(
            f"{str(path)!r} is one part of a model; join the parts first: llama-gguf-split --merge "
            "FIRST_PART NEW_FILE"
        )
    return ModelFiles(str(path.parent), path, None, False, path.name)


def ignored_adapter(found: ModelFiles) -> ModelError:
    """The error for a LoRA adapter that would not be applied."""
    if found.adapter is not None:
        what, aside = f"{found.shown!r} is a LoRA adapter", f"give {found.name!r}"
    else:
        what = f"{found.name!r} has a LoRA adapter ({ADAPTER}) next to its weights"
        aside = f"move {ADAPTER} away"
    return ModelError(
        f"{what}, and peft, which applies it, is not installed: pip install 'keyhole[lora]'; to "
        f"run without it, {aside}"
    )


def _on_hub(name: str, origin: Origin) -> ModelFiles:
    """The files of a hub id; what is in the local cache if the hub does not answer."""
    try:
        known = _known(name, _CONFIG, origin)
    except HFValidationError as error:
        raise _unknown(name, error, origin) from error
    silence, has_adapter = _ask(name, origin)
    if silence is None:
        try:
            config = Path(hf_hub_download(name, origin.place_of(_CONFIG), revision=origin.revision))
        except Exception as found:  # the network and the disk raise their own errors
            raise _unknown(name, found, origin) from found
        return ModelFiles(name, config, None, has_adapter)
    if known is None:
        raise _unknown(name, silence, origin) from silence
    return ModelFiles(name, known, _why(silence, origin), _known(name, ADAPTER, origin) is not None)


def lacks_tokenizer(found: ModelFiles) -> bool:
    """Whether a folder or hub id has no tokenizer; if the hub is silent, its local cache."""
    names: Iterable[Path]
    if Path(found.name).is_dir():
        names = Path(found.name).iterdir()
    elif found.unreachable is not None:
        names = found.config.parent.iterdir()
    else:  # a file missing in the cache may only have failed to download
        try:
            listed = list_repo_files(found.name, revision=found.origin.revision)
        except Exception:  # noqa: BLE001 - the hub's client and the network have their own
            return False
        folder = Path(found.origin.subfolder or ".")
        names = [path for path in map(Path, listed) if path.parent == folder]
    return not any(path.match(pattern) for path in names for pattern in _TOKENIZER_FILES)


def _known(name: str, file: str, origin: Origin) -> Path | None:
    """A file of a hub id in the local cache."""
    found = try_to_load_from_cache(name, origin.place_of(file), revision=origin.revision)
    return Path(found) if isinstance(found, str) else None


def _ask(name: str, origin: Origin) -> tuple[Exception | None, bool]:
    """Why the hub has no config of this name, None if it has one; and whether it has an adapter.

    Takes at most `_PATIENCE` seconds; no request is made under HF_HUB_OFFLINE.
    """
    if is_offline_mode():
        return OfflineModeIsEnabled("HF_HUB_OFFLINE is set"), False
    answers: list[tuple[Exception | None, bool]] = []

    def ask() -> None:
        try:
            _head(name, _CONFIG, origin)
        except Exception as error:  # noqa: BLE001 - the hub's client and the network have their own
            answers.append((error, False))
            return
        try:
            _head(name, ADAPTER, origin)
        except Exception:  # noqa: BLE001 - most models have none
            answers.append((None, False))
        else:
            answers.append((None, True))

    # In a thread, because resolving the hub's address has no time limit.
    thread = threading.Thread(target=ask, name="keyhole-hub", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if answers:
        return answers[0]
    return TimeoutError(f"no answer within {_PATIENCE:g} seconds"), False


def _head(name: str, file: str, origin: Origin) -> Any:
    url = hf_hub_url(name, origin.place_of(file), revision=origin.revision)
    return get_hf_file_metadata(url, timeout=_PATIENCE)


def _unknown(name: str, error: Exception, origin: Origin) -> ModelError:
    """The error for a name that is neither a folder nor a model on the hub."""
    return ModelError(
        f"unknown model {name!r}: it is not a folder{_nearest(Path(name))}, it is not in the hub's "
        f"local cache, and {_why(error, origin)}"
    )


def _why(error: Exception, origin: Origin) -> str:
    """Why the hub returned no model."""
    reasons = {
        GatedRepoError: "the model is gated: request access on its page on the hub, then run "
        "`hf auth login`",
        RepositoryNotFoundError: "the hub has no such model, or it is private (then run "
        "`hf auth login`)",
        RevisionNotFoundError: f"on the hub it has no revision {origin.revision!r}",
        RemoteEntryNotFoundError: f"on the hub it has no {origin.place_of(_CONFIG)}; if it has "
        "only LoRA adapters or GGUF files, give the model that they were made from",
        HFValidationError: "it is not a hub id such as 'meta-llama/Llama-3.2-1B'",
        OfflineModeIsEnabled: "the hub is not asked, because HF_HUB_OFFLINE is set",
    }
    told = next((reason for kind, reason in reasons.items() if isinstance(error, kind)), None)
    return told or f"the hub cannot be reached ({one_line(error)})"


def _nearest(folder: Path, files: str = f"*/{_CONFIG}") -> str:
    """In brackets, the most similar name in the same folder: a folder's, or a file's."""
    if not folder.parent.is_dir():
        return ""
    found = folder.parent.glob(files)
    known = [path.relative_to(folder.parent).parts[0] for path in found]
    message = str(UnknownNameError("folder", folder.name, known))
    return " (" + message.partition("; ")[2].partition(" (")[0] + ")" if "; " in message else ""
