"""Says what this installation has: versions, kernels, devices, extras and folders."""

from __future__ import annotations

import argparse
import importlib.util
import platform
from importlib import metadata
from typing import Any

import keyhole
from keyhole.cli.common import show
from keyhole.documents.source import default_place

_PACKAGES = ("torch", "transformers", "huggingface-hub", "safetensors", "tokenizers", "numpy")
#: Extras of the package, each with a module that only it installs.
_EXTRAS = {
    "plot": "matplotlib",
    "eval": "scipy",
    "serve": "fastapi",
    "convert": "markitdown",
    "lm-eval": "lm_eval",
    "kvpress": "kvpress",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `keyhole info`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints a line per fact."""
    found = _found()
    if arguments.json:
        print(show.to_json(found))
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
        devices[name] = f"{about.name}, {show.bytes_text(about.total_memory)}"
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
            name: "installed"
            if importlib.util.find_spec(module)
            else f'pip install "keyhole[{name}]"'
            for name, module in _EXTRAS.items()
        },
        "folders": {
            "package": keyhole.__path__[0],
            "documents": default_place(),
            "hub cache": constants.HF_HUB_CACHE,
        },
    }
