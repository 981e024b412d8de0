"""The command line: each command is a module or a class with `add_arguments` and `run`.

Heavy modules are imported when a command runs, so that `--help` does not load torch.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keyhole
from keyhole.cli.common import terminal
from keyhole.cli.common.parser import Parser, add_command, check_leftover, read_config
from keyhole.errors import KeyholeError, first_line, is_out_of_memory

#: Name and one line of help, in the order of `keyhole --help`.
COMMANDS = {
    "demo": "run two long tasks under four methods and their controls, and draw what was read",
    "generate": "continue a prompt",
    "chat": "chat with a model",
    "serve": "serve a model over HTTP, for any OpenAI client",
    "batch": "answer a file of requests in OpenAI's batch format",
    "documents": "store documents once, and ask questions over them",
    "methods": "list the policies and reuse methods, or describe one",
    "plan": "show how many layers fit into memory at which length",
    "calibrate": "choose DELTA's selection layers, or SamKV's stable layers, for a model",
    "train-head": "train SpeContext's retrieval head, or SeerAttention-R's gate",
    "eval": "evaluate a model on tasks, under several policies and budgets",
    "models": "list the model families of the installed transformers, and which run exactly",
    "verify": "compare the engine with transformers on a model",
    "info": "show versions, kernels, devices and folders of this installation",
    "bench": "measure decode steps, questions over documents, or a running server",
    "completion": "print a completion script for bash, zsh or fish",
}


def build_parser(config: Mapping[str, Any] = MappingProxyType({})) -> Parser:
    """The parser of `keyhole` with all its commands; config: values for their flags."""
    parser = Parser(prog="keyhole", description=(keyhole.__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"keyhole {keyhole.__version__}")
    commands = parser.add_subparsers(
        dest="command", title="commands", metavar="COMMAND", required=True
    )
    modules = _modules()
    for name, summary in COMMANDS.items():
        add_command(commands, name, summary, modules[name], config)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status: 0, 1 (a check failed), 2 (an error), 130 (Ctrl-C).

    Errors meant for a user are one line on stderr, with a traceback only after `--debug`.
    """
    # Spinning OpenMP threads starve each other on a busy machine; torch is not imported yet.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = list(sys.argv[1:] if argv is None else argv)
    terminal.open_streams()
    try:
        arguments, leftover = build_parser(read_config(given)).parse_known_args(given)
        check_leftover(arguments, leftover)
        status = int(arguments.run(arguments))
        sys.stdout.flush()  # where the output cannot be written, this is an error of the command
        return status
    except KeyholeError as error:
        if "--debug" in given:
            traceback.print_exc()
        terminal.error(str(error))
        return 2
    except BrokenPipeError:  # the reader of our output has gone, as in `keyhole generate | head`
        return 0
    except OSError as error:  # a disk that is full, a folder that is gone
        if "--debug" in given:
            traceback.print_exc()
        where = f" {error.filename!r}" if error.filename is not None else ""
        terminal.error(f"{error.strerror or error}{where}")
        return 2
    except (MemoryError, RuntimeError) as error:
        if "--debug" in given or not is_out_of_memory(error):
            raise
        reason = f": {first_line(error)}" if str(error) else ""  # Python's own says nothing
        terminal.error(f"not enough memory{reason}")
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    finally:
        terminal.drop_unwritable()


def _modules() -> dict[str, Any]:
    """The module or class of each command, by the command's name."""
    from keyhole.cli import (
        about,
        batch,
        bench,
        calibrate,
        demo,
        documents,
        evaluate,
        generate,
        plan,
        serve,
        train_head,
        verify,
    )

    return {
        "demo": demo,
        "generate": generate,
        "chat": generate.Chat,
        "serve": serve,
        "batch": batch,
        "documents": documents,
        "methods": about.Methods,
        "plan": plan,
        "calibrate": calibrate,
        "train-head": train_head,
        "eval": evaluate,
        "models": verify.Models,
        "verify": verify,
        "info": about.Info,
        "bench": bench,
        "completion": about.Completion,
    }
