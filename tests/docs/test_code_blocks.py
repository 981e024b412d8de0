"""Every block of Python, shell, JSON and TOML in README, CONTRIBUTING and docs/ runs as it stands.

The models of the hub that pages name are small checkpoints with random weights here, in folders of
the same names. `keyhole eval` runs over fewer and shorter samples. What cannot run at all is listed
in NOT_RUN, and stands below a comment `<!-- not run: the reason -->` on its page; its `keyhole`
commands are still parsed.
"""

from __future__ import annotations

import glob
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keyhole import LLM, ConfigError, cli
from tests.checkpoints import make_model
from tests.docs.markdown import DOCS, Block, code_blocks
from tests.server.conftest import serving

ROOT = Path(__file__).parents[2]

#: Pages, or their blocks in one language, that a test of their own runs.
RUN_ELSEWHERE = {
    ("README.md", "python"): "test_readme.py",
    ("docs/add-a-policy.md", "python"): "test_add_a_policy.py",
    ("docs/add-a-policy.md", "sh"): "test_add_a_policy.py",
    ("docs/add-a-policy.md", "toml"): "test_add_a_policy.py",
    ("docs/python-api.md", "python"): "test_python_api.py",
}
LANGUAGES = ("python", "sh", "bash", "json", "toml")
PAGES = {
    name: blocks
    for path in [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
    if (name := str(path.relative_to(ROOT)))
    and (
        blocks := [
            block
            for block in code_blocks(path.read_text())
            if block.language in LANGUAGES and (name, block.language) not in RUN_ELSEWHERE
        ]
    )
}
#: All blocks that do not run, by page, with the reasons that the page gives.
NOT_RUN = {
    "docs/how-to/adapters.md": ["it needs an adapter of yours"] * 3,
    "docs/attention.md": ["takes minutes", "takes hours, and needs a gated model"],
    "docs/evaluation.md": [
        "takes minutes; tests/eval/test_controls_example.py compares its table",
        "takes hours, and needs a gated model",
        "reads the file that the hours above write",
    ],
    "docs/kvpress.md": ["kvpress has an environment of its own: make test-kvpress"],
    "docs/lm-eval.md": 2 * ["the harness has an environment of its own: make test-lm-eval"],
    "docs/ray.md": 2 * ["Ray has an environment of its own: make test-ray"],
    "docs/samkv.md": ["it needs the folder of a sentence encoder"],
    "docs/tutorials/vllm.md": [
        "vLLM has an environment of its own: make test-vllm",
        *2 * ["it needs the server above"],
    ],
    "docs/vllm.md": 4 * ["vLLM has an environment of its own: make test-vllm"],
    "docs/tutorials/first-run.md": ["takes a minute; tests/cli/test_demo.py runs it"],
}
#: Pages whose commands take more than two seconds together, or reach nothing that others do not.
SLOW = (
    "docs/evaluation.md",
    "docs/how-to/batch.md",
    "docs/how-to/calibrate.md",
    "docs/how-to/compare.md",
    "docs/how-to/long-prompts.md",
    "docs/how-to/measure.md",
    "docs/how-to/offload.md",
    "docs/how-to/quantised-weights.md",
    "docs/how-to/verify.md",
    "docs/samkv.md",
    "docs/server.md",
    "docs/tutorials/long-reasoning.md",
    "docs/tutorials/own-model.md",
)
#: What the pages call "your model": its family, and sizes that differ from the smallest.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "meta-llama/Llama-3.2-1B": ("llama", {"max_position_embeddings": 4096}),
    "Qwen/Qwen2.5-1.5B-Instruct": (
        "qwen2",
        {"max_position_embeddings": 4096, "num_hidden_layers": 8},
    ),
}
#: Names that a page's code uses and its prose explains.
GIVEN = {
    "docs/samkv.md": {
        "model": "tiny",
        "text": 20 * "Alma keeps 17 . the old river falls . ",
        "question": "question : Alma keeps ? answer :",
        "names": ["handbook", "faq"],
    },
    "docs/specontext.md": {"model": "tiny"},
}
#: Where the pages say a server listens.
ADDRESS = "http://127.0.0.1:8000"


def commands(code: str) -> Iterator[list[str]]:
    """The commands of a shell block, as lists of words; a quoted text may go over several lines."""
    for line in re.split(r"\n(?=\w)", code.replace("\\\n", " ").strip()):
        words = shlex.split(line, comments=True)
        if words:
            yield words


def known(words: list[str]) -> bool:
    """Whether a command that no test runs would be understood; parsing exits where it is not."""
    program, *arguments = words
    if program == "keyhole":
        cli.build_parser().parse_args(arguments)
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = re.findall(r"(?:keyhole|\.)\[(.*?)\]", " ".join(arguments))
        assert {e for extra in extras for e in extra.split(",")} <= {
            *project["optional-dependencies"]
        }
    elif program == "python" and arguments[0] == "-m":
        assert (ROOT / f"{arguments[1].replace('.', '/')}.py").is_file() or (
            ROOT / arguments[1].replace(".", "/") / "__main__.py"
        ).is_file()
    else:
        return words == ["hf", "auth", "login"]
    return True


def run(words: list[str]) -> None:
    """Runs `keyhole` in this process, curl beside it; others are looked up."""
    words = [name for word in words for name in (sorted(glob.glob(word)) or [word])]
    served = words[:2] == ["keyhole", "serve"]  # it never ends; the fixture `server` stands for it
    if words[0] == "keyhole" and not served:
        # The last value of a flag counts. `vt` needs some 1,600 tokens.
        smaller = []
        if words[1] == "eval":
            smaller = ["--lengths", "2048" if "vt" in words else "256", "--limit", "1"]
            smaller += ["--policies", "delta", "--budgets", "1/8"]
        elif words[1:3] == ["bench", "serve"]:
            smaller = ["--requests", "16"]
        assert cli.main([*words[1:], *smaller]) == 0, words
    elif words[0] == "curl":
        subprocess.run(["curl", "--silent", "--fail", *words[1:]], check=True, timeout=60)
    else:
        assert known(words), words


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: make_model(kind, folder / name.replace("/", "-"), tokenizer=True, **sizes)
        for name, (kind, sizes) in MODELS.items()
    }


@pytest.fixture
def place(tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a reader: his model, and a few texts."""
    for name, path in models.items():
        shutil.copytree(path, tmp_path / name)
    text = "Alma keeps 17 . the old river falls . Boris keeps 23 . "
    (tmp_path / "chapters").mkdir()
    for name in (
        "report.txt",
        "handbook.txt",
        "faq.txt",
        "book.txt",
        "chapters/1.md",
        "chapters/2.md",
    ):
        # One page offloads the report; windows of the book have 256 tokens.
        repeats = 40 if name in ("report.txt", "book.txt") else 10
        (tmp_path / name).write_text(repeats * text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def server(place: Path) -> Iterator[str]:
    # `bench serve` sends prompts of up to 1,024 tokens.
    llm = LLM(
        "tiny",
        policy="delta:token_budget=1024",
        memory="64MiB",
        max_length=2048,
        documents=place / "served",
    )
    with serving(llm, served_model_name="Llama-3.2-1B-Instruct") as address:
        yield address


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW)) for page in PAGES]
)
def test_the_blocks_of_a_page_run(page: str, place: Path, request: pytest.FixtureRequest) -> None:
    blocks = PAGES[page]
    address = ADDRESS
    if any(ADDRESS in block.code for block in blocks if not block.reason):
        address = request.getfixturevalue("server")
    if any("curl " in block.code for block in blocks) and not shutil.which("curl"):
        pytest.skip("the page shows curl commands, and curl is not installed")
    names: dict[str, Any] = dict(GIVEN.get(page, {}))
    for block in blocks:
        code = block.code.replace(ADDRESS, address)
        if block.language == "python":
            source = compile(code, page, "exec")
            if not block.reason:
                exec(source, names)
        elif block.language == "json":
            json.loads(code)
        elif block.language == "toml":
            tomllib.loads(code)
        else:
            for words in commands(code):
                if not block.reason:
                    run(words)
                elif words[0] == "keyhole":
                    assert known(words)


def test_a_page_that_is_run_elsewhere_has_its_test() -> None:
    for (page, _), test in RUN_ELSEWHERE.items():
        assert (ROOT / page).is_file()
        assert Path(page).name in (Path(__file__).parent / test).read_text()


def test_every_block_that_does_not_run_is_listed_with_its_reason() -> None:
    found = {
        page: reasons
        for page, blocks in PAGES.items()
        if (reasons := [block.reason for block in blocks if block.reason])
    }
    assert found == NOT_RUN


def test_a_block_without_a_language_has_no_code() -> None:
    """So that nothing escapes: such a block is a drawing, or what a program printed."""
    first = re.compile(r"(keyhole|make|pip|curl|python|import|from|\$) ")
    for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        for block in code_blocks(path.read_text()):
            assert block.language in ("", "text", *LANGUAGES), path
            assert block.language in LANGUAGES or not first.match(block.code), (path, block.code)


def test_a_block_knows_its_reason() -> None:
    text = "```python\nx\n```\n\n<!-- not run: long -->\n```sh\ny\n```\n\n```\nz\n```\n"
    assert code_blocks(text) == [
        Block("python", "x\n", ""),
        Block("sh", "y\n", "long"),
        Block("", "z\n", ""),
    ]
    indented = "1. One:\n\n    ```python\n    x\n    ```\n"
    assert code_blocks(indented) == [Block("python", "x\n", "")]


def test_an_unknown_command_is_seen() -> None:
    assert not known(["kehole", "demo"])
    with pytest.raises(ConfigError):
        known(["keyhole", "generate", "--no-such-flag"])
    with pytest.raises(AssertionError):
        known(["make", "nothing"])
    with pytest.raises(AssertionError):
        known(["pip", "install", "keyhole[nothing]"])
    with pytest.raises(AssertionError):
        known(["pip", "install", ".[nothing]"])
    assert list(commands("a b \\\n  c  # why\nd 'e\n f'\n")) == [["a", "b", "c"], ["d", "e\n f"]]
