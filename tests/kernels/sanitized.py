"""Runs the kernels' tests with an extension that was built with sanitizers: `make sanitize`.

    python tests/kernels/sanitized.py FILE [arguments of pytest]

The process must have been started with the AddressSanitizer's library preloaded.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

NAME = "keyhole.kernels._cpu"


def main() -> int:
    """Puts the extension in the place of the installed one, and tests."""
    file, *arguments = sys.argv[1:]
    spec = importlib.util.spec_from_file_location(NAME, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[NAME] = module

    from keyhole.kernels import cpu

    assert Path(str(cpu.extension.__file__)) == Path(file).resolve()
    return pytest.main([str(Path(__file__).parent), "-k", "not reference", *arguments])


if __name__ == "__main__":
    raise SystemExit(main())
