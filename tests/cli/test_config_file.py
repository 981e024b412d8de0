"""Values for flags from a TOML file, which flags come before."""

from __future__ import annotations

import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from keyhole.cli import build_parser
from keyhole.cli.common import parser
from tests.cli.conftest import Run

TEXT = """
model = "mine"

[generate]
policy = "delta:token_budget=512"
max-tokens = 100
stop = ["a", "b"]
stop_token_ids = [1, 2]
ignore_eos = true
prefix_cache = false

[documents.ask]
documents = ["x", "y"]

[bench]
contexts = [32, 64]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keyhole.toml"
    path.write_text(TEXT)
    return path


def parsed(file: Path, *given: str) -> Namespace:
    line = [*given, "--config", str(file)]
    return build_parser(parser.read_config(line)).parse_args(line)


def test_values_are_as_if_they_were_given(file: Path) -> None:
    found = vars(parsed(file, "generate", "x"))
    given = (
        "--model mine --policy delta:token_budget=512 --max-tokens 100 --stop a --stop b "
        "--stop-token-ids 1,2 --ignore-eos --no-prefix-cache"
    ).split()
    wanted = vars(build_parser().parse_args(["generate", "x", *given]))
    for name in set(wanted) - {"config", "parser"}:
        assert found[name] == wanted[name], name
    assert parsed(file, "documents", "ask", "x").documents == ["x", "y"]
    assert parsed(file, "bench", "decode").contexts == "32,64"
    assert parsed(file, "verify").model == "mine"


def test_a_byte_order_mark_is_ignored(file: Path) -> None:
    file.write_text(file.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert parsed(file, "verify").model == "mine"


def test_biases_of_tokens_are_a_table(file: Path) -> None:
    file.write_text("[generate.logit_bias]\n15 = -100\n7 = 1.5\n")
    assert parsed(file, "generate", "x").logit_bias == ["15=-100", "7=1.5"]


def test_flags_come_before_the_file(file: Path) -> None:
    found = parsed(file, "generate", "x", "--model", "other", "--max-tokens", "7")
    assert (found.model, found.max_tokens) == ("other", "7")


def test_the_environment_names_a_file_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYHOLE_CONFIG", str(file))
    assert build_parser(parser.read_config(["chat"])).parse_args(["chat"]).model == "mine"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("= 1", "keyhole.toml' cannot be read"),
        ("max_tokens = 1", "max_tokens must be in the table of a command, such as [generate]"),
        ("generate = 1", "generate must be in the table of a command"),
        ("[generate]\nmax_token = 1", "'max_token'; did you mean 'max_tokens'?"),
        (
            "[generate]\nprompt = 'x'",
            "unknown flag of keyhole generate in the config file",
        ),
        ("[generate]\nignore_eos = 'yes'", "ignore_eos 'yes' in the config file must be true or"),
        ("[generate]\nmax_tokens = 'many'", "--max-tokens 'many' must be a whole number"),
        ("[generate]\npolicy = 'detla'", "did you mean 'delta'?"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(text: str, says: str, run: Run, file: Path) -> None:
    file.write_text(text)
    ran = run("generate", "x", "--config", str(file))
    assert ran.status == 2
    assert says in ran.err
    assert ran.err.count("\n") == 1


def test_a_missing_file_is_said(run: Run) -> None:
    assert "--config 'no.toml' cannot be read" in run("chat", "--config", "no.toml").err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_knows_commands_and_flags(shell: str, run: Run) -> None:
    ran = run("completion", shell)
    assert ran.status == 0
    for word in ("generate", "documents", "total-memory"):
        assert word in ran.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("generate --policy d", {"delta"}),
        ("documents ask --reuse e", {"epic"}),
        ("methods sa", {"sam_kv"}),
        ("eval --suite p", {"paper"}),
        ("bench ", {"decode", "admission"}),
        ("completion f", {"fish"}),
    ],
)
def test_a_completion_knows_names(typed: str, names: set[str], run: Run, tmp_path: Path) -> None:
    """It promised the names of methods and had none."""
    script = tmp_path / "completion"
    script.write_text(run("completion", "bash").out)
    words = ["keyhole", *typed.split(" ")]
    listed = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {script}; COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; "
        "$(complete -p keyhole | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", code], check=True, capture_output=True, text=True)
    assert names <= set(done.stdout.split()), done.stderr
    assert all(name.startswith(words[-1]) for name in done.stdout.split())


def test_an_unknown_shell_is_refused(run: Run) -> None:
    assert "unknown shell 'csh'" in run("completion", "csh").err


YAML = """
model: mine
serve:
  port: 8123
  api_key: [a, b]
  policy: {name: delta, token_budget: 512, delta_layers: [2, 3]}
  max_queue: 7
  prefix_cache: false
  drain-timeout: 2.5
  documents_limit: 20MiB
  offload:
"""


def test_a_server_has_all_its_settings_in_a_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(YAML)
    config = parser.read_config(["serve", "--config", str(path)])
    found = build_parser(config).parse_args(["serve", "--port", "9"])
    assert (found.model, found.port, found.max_queue) == ("mine", "9", "7")
    assert found.api_key == ["a", "b"]
    assert found.policy == "delta:token_budget=512,delta_layers=2,3"
    assert (found.drain_timeout, found.prefix_cache) == ("2.5", "False")
    assert (found.documents_limit, found.offload) == ("20MiB", None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("serve: {port: [}", "cannot be read"),
        ("- a\n- b\n", "must be a table"),
        ("1: 2\n", "must be a table"),
        ("serve: {policy: {token_budget: 4}}", "must have a name"),
        ("serve: {portt: 4}", "did you mean 'port'"),
        ("serve: {policy: !!python/name:os.system }", "cannot be read"),
    ],
)
def test_a_yaml_file_that_cannot_be_is_one_line(
    tmp_path: Path, run: Run, text: str, said: str
) -> None:
    path = tmp_path / "server.yml"
    path.write_text(text)
    error = run("serve", "--config", str(path)).err
    assert said in error
    assert error.count("\n") == 1
