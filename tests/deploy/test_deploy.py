"""The files in deploy/: containers, a systemd unit, a compose stack."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from keyhole.cli import main

FOLDER = Path(__file__).parents[2] / "deploy"
FILES = sorted(FOLDER.glob("*.Containerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_image_is_built_in_stages_and_runs_unprivileged(path: Path) -> None:
    found = instructions(path)
    stages = [i for i, (name, _) in enumerate(found) if name == "FROM"]
    assert len(stages) == 2
    last = dict(found[stages[-1] :])
    assert last["USER"] == "10001"
    assert "ready" in last["HEALTHCHECK"]
    assert "--from=build" in last["COPY"]
    assert " g++" not in last["RUN"]  # compilers of the first stage stay there


def test_there_is_one_for_each_device() -> None:
    assert [path.stem for path in FILES] == ["cpu", "cuda"]


def served(command: str) -> list[str]:
    words = shlex.split(command)
    return words[words.index("serve") :]


@pytest.mark.parametrize(
    "command",
    [re.sub(r'[\[\],"]', " ", dict(instructions(path))["ENTRYPOINT"]) for path in FILES]
    + [
        line.removeprefix("ExecStart=")
        for line in (FOLDER / "keyhole.service").read_text(encoding="utf-8").splitlines()
        if line.startswith("ExecStart=")
    ],
)
def test_its_flags_are_those_of_the_program(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag that is not there would be told before the port, which cannot be."""
    assert main([*served(command), "--api-key", "k", "--port", "99999"]) == 2
    assert "port 99999" in capsys.readouterr().err


def test_a_container_that_got_no_key_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    """It listens on all addresses of its network."""
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "give an api_key" in capsys.readouterr().err


def test_compose_builds_what_is_there() -> None:
    stack = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert (FOLDER.parent / stack["keyhole"]["build"]["dockerfile"]).is_file()
    ports = [port for service in stack.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    for mount in stack["prometheus"]["volumes"]:
        assert (FOLDER / mount.split(":")[0]).is_file()
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))[
        "scrape_configs"
    ]
    assert job["static_configs"][0]["targets"] == ["keyhole:8000"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_has_nothing_to_say_about_the_unit(tmp_path: Path) -> None:
    unit = (FOLDER / "keyhole.service").read_text(encoding="utf-8")
    place = tmp_path / "keyhole.service"
    place.write_text(unit.replace("/opt/keyhole/bin/keyhole", sys.executable), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(place)], capture_output=True, text=True
    )
    said = [line for line in done.stderr.splitlines() if "keyhole" in line]
    assert (done.returncode, said) == (0, [])
