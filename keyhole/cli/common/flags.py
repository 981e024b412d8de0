"""Flags derived from settings: name, type, default and help come from the dataclass field."""

from __future__ import annotations

import argparse
import dataclasses
import filecmp
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole.cli.common import terminal
from keyhole.config import (
    EngineConfig,
    SamplingParams,
    bytes_text,
    help_of,
    is_size,
    kind_of,
    read_setting,
)
from keyhole.errors import ConfigError
from keyhole.models.locate import TINY, TINY_FOLDER, ModelFiles, Origin, is_tiny, locate
from keyhole.models.weights.weight_format import weight_format
from keyhole.policies import available_policies, make_policy
from keyhole.policies.prefill import make_prefill_policy
from keyhole.registry import require_depth
from keyhole.reuse import reuse_names

if TYPE_CHECKING:
    from keyhole.llm import LLM
    from keyhole.models.model import Model

_METAVARS = {
    "int": "N",
    "float": "X",
    "tuple[int, ...]": "N,N",
    "Names": "NAME,NAME",
    "Budgets": "N,1/N",
}

#: Kinds of settings whose flag can be repeated, with its metavar.
_REPEATED = {"tuple[str, ...]": "TEXT", "Mapping[int, float]": "ID=X"}


def add_model(
    parser: argparse.ArgumentParser, *, loads: bool = True, default: str = "tiny"
) -> None:
    """--model; --device and --dtype where the model is loaded. default: as the help says it."""
    text = "folder, hub id, GGUF file, or tiny, the bundled demonstration model"
    parser.add_argument("--model", metavar="MODEL", help=f"{text}; default: {default}")
    text = "branch, tag or commit of a hub id; default: its main branch"
    parser.add_argument("--revision", metavar="NAME", help=text)
    text = "folder inside the model's folder or hub repository that contains its files"
    parser.add_argument("--subfolder", metavar="PATH", help=text)
    text = "run Python files of the model, for a family that transformers does not have"
    parser.add_argument("--trust-remote-code", action="store_true", help=text)
    if not loads:
        return
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:0")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument(
        "--weights",
        metavar="FORMAT",
        help="int4 or int8: quantise the weights while loading, on a CPU (int4:group_size=N for "
        "groups of 32, 64 or 128 weights); dequantised: expand the blocks of a GGUF file to "
        "--dtype; default: as stored",
    )


def add_adapters(parser: argparse.ArgumentParser) -> None:
    """--adapters, of the LoRA adapters that requests may choose."""
    parser.add_argument(
        "--adapters",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="LoRA adapter that requests may choose by this name; can be repeated",
    )


def add_device_map(parser: argparse.ArgumentParser) -> None:
    """--device-map, for a model larger than one GPU."""
    parser.add_argument(
        "--device-map",
        choices=("auto",),
        help="auto: spread the model's layers over all GPUs; default: all on --device",
    )


def adapters_of(arguments: argparse.Namespace) -> dict[str, str]:
    """The folders of the adapters, by name; ConfigError for a name without one."""
    found = {}
    for given in getattr(arguments, "adapters", []):
        name, _, folder = given.partition("=")
        if not (name and folder) or name in found:
            raise ConfigError(f"--adapters {given!r} must be NAME=FOLDER, each name once")
        found[name] = folder
    return found


def add_data(parser: argparse.ArgumentParser, what: str) -> None:
    """--data; what: the texts in the file."""
    parser.add_argument(
        "--data",
        metavar="FILE",
        help=f"{what}: a JSON string or list of token ids per line of a .jsonl file, or the whole "
        "of any other file; default: texts of the bundled model's world",
    )


def add_settings(
    parser: argparse.ArgumentParser,
    cls: type[Any],
    title: str,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
) -> None:
    """A flag for every field of a settings class, or for some."""
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(cls):
        if field.name not in without and (not only or field.name in only):
            _add_field(group, field)


def settings_of(arguments: argparse.Namespace, cls: type[Any]) -> dict[str, Any]:
    """The settings that were given, in the types of their fields."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    given = {name: getattr(arguments, name, None) for name in fields}
    return {
        name: read_setting(fields[name], text, flag_of(name))
        for name, text in given.items()
        if text is not None
    }


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    """The SamplingParams among the arguments."""
    return SamplingParams(**settings_of(arguments, SamplingParams))


def require_json_for_logprobs(arguments: argparse.Namespace) -> None:
    """ConfigError for --logprobs without --json, which alone shows them."""
    if arguments.logprobs is not None and not arguments.json:
        raise ConfigError("--logprobs needs --json, which shows them")


# Copied from `keyhole.documents.store`, which imports torch.
_CHECKS = ("open", "read")
_CHECK_HELP = (
    "what is verified by checksums: open: a record's statistics when it is opened; read: "
    "everything that is read from it"
)


def add_check(parser: argparse._ActionsContainer, flag: str) -> None:
    """When records are compared with their checksums."""
    parser.add_argument(flag, default="open", choices=_CHECKS, metavar="WHAT", help=_CHECK_HELP)


#: What `add_documents` adds, by the names of LLM's arguments.
_DOCUMENTS = ("documents", "documents_limit", "documents_check")


def add_documents(parser: argparse.ArgumentParser) -> None:
    """--documents, and the other flags of a document store that a command opens."""
    group = parser.add_argument_group("documents")
    group.add_argument("--documents", metavar="PLACE", help="folder or URL of stored documents")
    text = "size limit of the store, such as 20GiB; default: no limit"
    group.add_argument("--documents-limit", metavar="SIZE", help=text)
    add_check(group, "--documents-check")


def add_policy(parser: argparse.ArgumentParser) -> None:
    """--policy."""
    _add_method(parser, "policy", "full", "what a decode step reads", available_policies())


def add_reuse(parser: argparse.ArgumentParser) -> None:
    """--reuse."""
    what = "what a prompt keeps and recomputes of stored documents"
    _add_method(parser, "reuse", "sam_kv", what, reuse_names())


def _add_method(
    parser: argparse.ArgumentParser, kind: str, default: str, what: str, names: Iterable[str]
) -> None:
    group = parser.add_argument_group(f"{kind}: {what}")
    text = (
        f"{', '.join(names)}; with settings after the name, NAME:SETTING=VALUE,SETTING=VALUE, as "
        "`keyhole methods NAME` lists them; or a settings file, NAME.json"
    )
    group.add_argument(f"--{kind}", default=default, metavar="NAME", help=text)


def find_model(arguments: argparse.Namespace) -> ModelFiles:
    """The files of the model that the arguments name; queries the hub only once.

    `load_model` calls it before torch and transformers are imported, so that a wrong name fails at
    once. Commands that import them earlier call it themselves.
    """
    if "model_files" not in arguments:
        origin = Origin(arguments.revision, arguments.subfolder, arguments.trust_remote_code)
        model = TINY if arguments.model is None else arguments.model
        arguments.model_files = locate(model, origin)
    found: ModelFiles = arguments.model_files
    return found


def load_model(arguments: argparse.Namespace) -> Model:
    """The model that the arguments name."""
    weight_format(arguments.weights)  # refused before the model is loaded
    adapters = adapters_of(arguments)
    device_map = getattr(arguments, "device_map", None)
    found = find_model(arguments)
    terminal.status(f"loading {arguments.model or TINY} ...")
    quiet()
    from keyhole.bench import measure
    from keyhole.exactness_gate import require
    from keyhole.models.device_map import require_alone
    from keyhole.models.loading import load_files

    require_alone(device_map, arguments.device)

    def accept(config: Any, name: str) -> None:
        measured = require(config, name)
        if measured is not None:
            terminal.status(measured)

    measure.device(arguments.device)  # before the weights
    tokenizer = getattr(arguments, "tokenizer", None)
    weights, dtype = arguments.weights, arguments.dtype
    return load_files(
        found, arguments.device, dtype, tokenizer, accept, weights, adapters, device_map
    )


#: The file in which a folder has its vocabulary.
_TOKENIZER = "tokenizer.json"


def has_bundled_vocabulary(model: str | None) -> bool:
    """Whether the model is a bundled one, as the default is, or a folder with their tokenizer."""
    if model is None or is_tiny(model):
        return True
    own = Path(model) / _TOKENIZER
    return own.is_file() and filecmp.cmp(own, TINY_FOLDER / _TOKENIZER, shallow=False)


def require_server(command: str) -> None:
    """ConfigError unless the packages of the extra `keyhole[serve]` are installed."""
    if not all(map(importlib.util.find_spec, ("fastapi", "fastapi_offline", "uvicorn"))):
        raise ConfigError(f"keyhole {command} needs more packages: pip install 'keyhole[serve]'")


def make_llm(arguments: argparse.Namespace, store: Mapping[str, Any] | None = None) -> LLM:
    """The model, policy and engine that the arguments describe; settings are checked first.

    store: arguments of `LLM` for its documents; None: those of `add_documents`.
    """
    named = getattr(arguments, "policy", None)
    policy = make_policy(named)
    settings = settings_of(arguments, EngineConfig)
    config = EngineConfig(**settings)  # checks them before the model is loaded
    if config.prefill_policy is not None:
        make_prefill_policy(config.prefill_policy)
    model = load_model(arguments)
    require_depth(named, model.geometry(EngineConfig.page_size).num_layers)
    from keyhole.llm import LLM

    if store is None:
        store = {name: value for name, value in vars(arguments).items() if name in _DOCUMENTS}
    return LLM(model, policy=policy, **settings, **store)


def quiet() -> None:
    """Turns off the progress bars of libraries if stderr is not a terminal."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from transformers.utils import logging

        logging.disable_progress_bar()


def _add_field(group: Any, field: dataclasses.Field[Any]) -> None:
    """Adds a flag; its value is text until `settings_of` converts it, None if it was not given."""
    flag, text = flag_of(field.name), _with_default(help_of(field), field)
    if field.type == "bool":
        _add_switch(group, field.name, field, text)
        return
    text = text.replace("%", "%%")
    if kind_of(field) in _REPEATED:
        text += "; can be repeated"
        metavar = _REPEATED[kind_of(field)]
        group.add_argument(flag, dest=field.name, metavar=metavar, action="append", help=text)
    else:
        group.add_argument(flag, dest=field.name, metavar=_metavar(field), help=text)


def _add_switch(group: Any, name: str, field: dataclasses.Field[Any], text: str) -> None:
    """Adds a flag without a value, which sets the opposite of the default."""
    flag = flag_of("no_" + name) if field.default else flag_of(name)
    text = f"do not {text}" if field.default else text
    const = str(not field.default)
    group.add_argument(
        flag, dest=name, action="store_const", const=const, help=text.replace("%", "%%")
    )


def _with_default(text: str, field: dataclasses.Field[Any]) -> str:
    """The help followed by the default. What None means is the default, or no flag can give it."""
    if field.default is None:
        return text.replace("None: ", "default: ")
    text = text.partition("; None: ")[0]
    default: Any = field.default
    shown = bytes_text(default) if is_size(field) else terminal.setting(default)
    plain = default in ((), "") or isinstance(default, bool)
    return text if plain else f"{text}; default: {shown}"


def _metavar(field: dataclasses.Field[Any]) -> str:
    return "SIZE" if is_size(field) else _METAVARS.get(kind_of(field), "TEXT")


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")
