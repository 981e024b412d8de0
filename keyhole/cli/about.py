"""What is installed: methods, versions, devices; and completion scripts for shells."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import platform
import sys
import textwrap
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import keyhole
from keyhole import cli
from keyhole.cache.layout import ITEMSIZES
from keyhole.cli import bench
from keyhole.cli.common import terminal
from keyhole.cli.common.parser import Parser
from keyhole.cli.evaluate import SUITES
from keyhole.config import bytes_text, help_of, require_known
from keyhole.documents.source import default_place
from keyhole.errors import UnknownNameError
from keyhole.policies import available_controls, available_policies, policy_name
from keyhole.policies.prefill import available_prefill_controls, available_prefill_policies
from keyhole.reuse import available_reuse_methods, reuse_name, reuse_names

_WIDTH = 96
#: The paragraph of a docstring that is for docs/methods.md.
_LEFT_OUT = "Differences "
_KINDS = {
    "policy": "--policy: what a decode step reads",
    "prefill-policy": "--prefill-policy: what the tokens of long prompts read",
    "reuse": "--reuse: what a prompt keeps of stored documents",
}


def _add_method_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole methods`."""
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a policy, prefill policy or reuse method"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run_methods(arguments: argparse.Namespace) -> int:
    """Prints the table, or one method."""
    tables: dict[str, Mapping[str, type[Any]]] = {
        "policy": available_policies(),
        "prefill-policy": available_prefill_policies(),
        "reuse": available_reuse_methods(),
    }
    named = None
    if arguments.name is not None:
        # Controls are no methods, but `--policy` takes them, too.
        tables["policy"] = available_policies() | available_controls()
        tables["prefill-policy"] = available_prefill_policies() | available_prefill_controls()
        named = _find(arguments.name, tables)
        kind, name = named
        tables = {kind: {name: tables[kind][name]}}
    if arguments.json:
        found = [about(kind, *pair) for kind, table in tables.items() for pair in table.items()]
        print(terminal.to_json({"methods": found}))
    elif named is not None:
        kind, name = named
        print(_text(kind, name, tables[kind][name]))
    else:
        width = max(len(name) for table in tables.values() for name in table)
        for kind, table in tables.items():
            print(f"{_KINDS[kind]}\n")
            for name, cls in table.items():
                print(_wrapped(f"{name:{width}}  {summary(cls)}", width + 4))
            print()
        print("`keyhole methods NAME` describes one of them")
    return 0


def about(kind: str, name: str, cls: type[Any]) -> dict[str, Any]:
    """A method as JSON: its description, and its settings with their defaults."""
    settings = [
        {"name": field.name, "default": field.default, "type": str(field.type), "help": text}
        for field, text in settings_of(cls)
    ]
    return {
        "name": name,
        "kind": kind,
        "summary": summary(cls),
        "about": "\n\n".join(paragraphs(cls)),
        "settings": settings,
    }


def summary(cls: type[Any]) -> str:
    """The first paragraph of the class's docstring in one line."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].split())


def description(cls: type[Any]) -> str:
    """The description of a method: its class's docstring if the module has several methods, else
    the module's.
    """
    own = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[2]
    return own or inspect.getdoc(sys.modules[cls.__module__]) or ""


def paragraphs(cls: type[Any]) -> list[str]:
    """The description of a method without the differences from the paper."""
    return [part for part in description(cls).split("\n\n") if not part.startswith(_LEFT_OUT)]


def settings_of(cls: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], str]]:
    """Every setting of a method with its help."""
    return ((field, help_of(field)) for field in dataclasses.fields(cls))


def _find(name: str, tables: Mapping[str, Mapping[str, type[Any]]]) -> tuple[str, str]:
    plain = name.lower()
    named = {"policy": policy_name(name), "prefill-policy": plain, "reuse": reuse_name(name)}
    for kind, known in named.items():
        if known in tables[kind]:
            return kind, known
    raise UnknownNameError("method", name, [one for table in tables.values() for one in table])


def _text(kind: str, name: str, cls: type[Any]) -> str:
    parts = ["\n\n".join(paragraphs(cls))]
    rows = [
        _wrapped(f"  {field.name} ({terminal.setting(field.default) or 'none'}): {text}", 6)
        for field, text in settings_of(cls)
    ]
    if rows:
        first = dataclasses.fields(cls)[0]
        value = terminal.setting(first.default)
        parts.append("\n".join([f"Settings, as in --{kind} {name}:{first.name}={value}", *rows]))
    return "\n\n".join(parts)


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=" " * indent)


_PACKAGES = ("torch", "transformers", "huggingface-hub", "safetensors", "tokenizers", "numpy")
#: The package's extras for users, each with a module that no other extra installs.
_EXTRAS = {
    "plot": "matplotlib",
    "eval": "scipy",
    "serve": "fastapi",
    "bench": "aiohttp",
    "otel": "opentelemetry.exporter.otlp.proto.http",
    "convert": "markitdown",
    "lora": "peft",
    "quantized": "torchao",
    "gguf": "gguf",
    "embeddings": "sqlite_vec",
    "lm-eval": "lm_eval",
    "kvpress": "kvpress",
    "vllm": "vllm",
    "ray": "ray",
}


def _add_info_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole info`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run_info(arguments: argparse.Namespace) -> int:
    """Prints one line per fact."""
    found = _found()
    if arguments.json:
        print(terminal.to_json(found))
        return 0
    for group, facts in found.items():
        print(f"{group}:")
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"  {name:{width}}  {value}")
    return 0


def _found() -> dict[str, dict[str, Any]]:
    import torch
    from huggingface_hub import constants

    from keyhole import kernels
    from keyhole.bench import measure

    cpu = torch.device("cpu")
    machine = measure.machine(cpu)
    devices = {"cpu": f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"}
    backends = {"cpu": kernels.backend(cpu)}
    for number in range(torch.cuda.device_count()):
        name = f"cuda:{number}"
        about = torch.cuda.get_device_properties(number)
        devices[name] = f"{about.name}, {bytes_text(about.total_memory)}"
        backends[name] = kernels.backend(torch.device(name))
    return {
        "versions": {
            "keyhole": keyhole.__version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _PACKAGES},
        },
        "devices": devices,
        "kernels": backends,
        "extras": {
            name: "installed" if _is_installed(module) else f'pip install "keyhole[{name}]"'
            for name, module in _EXTRAS.items()
        },
        "folders": {
            "package": keyhole.__path__[0],
            "documents": default_place(),
            "hub cache": constants.HF_HUB_CACHE,
        },
    }


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that would contain it is missing
        return False


SHELLS = ("bash", "zsh", "fish")


def _add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole completion`."""
    parser.add_argument("shell", metavar="SHELL", help=", ".join(SHELLS))


def _run_completion(arguments: argparse.Namespace) -> int:
    """Prints the script."""
    import shtab

    require_known("shell", arguments.shell, SHELLS)
    print(shtab.complete(_filled(cli.build_parser()), arguments.shell))
    return 0


def _filled(parser: Parser) -> Parser:
    """The parser with the arguments of all commands, with final help texts."""
    for command in parser.commands().values():
        _filled(command)
        for action in command._actions:
            # Only for completion: a value may also be a name with settings, or a file.
            action.choices = _names(command.prog, action.dest) or action.choices
    return parser


def _names(prog: str, dest: str) -> list[str]:
    """The possible values of an argument of a command; none where they are not listed."""
    policies = list(available_policies())
    if prog == "keyhole methods":
        return [*policies, *reuse_names()] if dest == "name" else []
    names = {
        "benchmark": list(bench.SETTINGS),
        "dtype": ["auto", *ITEMSIZES],
        "policy": policies,
        "reuse": reuse_names(),
        "shell": list(SHELLS),
        "suite": list(SUITES),
    }
    return names.get(dest, [])


class Methods:
    """Lists the policies and reuse methods, or describes one of them.

    With NAME: the idea, the paper, the cost, when to use it, and the settings that may follow its
    name in `--policy` or `--reuse`. docs/methods.md also lists the differences from each paper.
    """

    add_arguments = staticmethod(_add_method_arguments)
    run = staticmethod(_run_methods)


class Info:
    """Shows what is installed: versions, kernels, devices, extras and folders."""

    add_arguments = staticmethod(_add_info_arguments)
    run = staticmethod(_run_info)


class Completion:
    """Prints a script that lets a shell complete commands, flags and the names of methods.

    bash: keyhole completion bash > ~/.local/share/bash-completion/completions/keyhole
    zsh:  keyhole completion zsh > ~/.zfunc/_keyhole, with ~/.zfunc in $fpath
    fish: keyhole completion fish > ~/.config/fish/completions/keyhole.fish
    """

    add_arguments = staticmethod(_add_completion_arguments)
    run = staticmethod(_run_completion)
