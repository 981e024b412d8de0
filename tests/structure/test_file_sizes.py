"""Files stay small enough to be understood at once."""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]

MOST_CODE_LINES = 400

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def _docstring_starts(source: str) -> set[tuple[int, int]]:
    return {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
    }


def code_lines(source: str) -> int:
    """The lines of `source` that are not blank, not comments and not docstrings."""
    docstrings = _docstring_starts(source)
    text = source.splitlines()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE and token.start not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
    return sum(bool(text[line - 1].strip()) for line in lines)


def test_no_file_is_too_long() -> None:
    texts = {path: path.read_text() for path in (ROOT / "keyhole").rglob("*.py")}
    sizes = {
        str(path.relative_to(ROOT)): code_lines(text)
        for path, text in texts.items()
        if text.count("\n") >= MOST_CODE_LINES
    }
    assert not {path: size for path, size in sizes.items() if size > MOST_CODE_LINES}


def test_blank_lines_comments_and_docstrings_are_no_code() -> None:
    source = '''"""What the module
is for."""

# why
class A:  # counted
    """A thing.

    In three lines.
    """

    def f(self):
        """Nothing."""
        return (  # counted, as are the next three
            1,
            2,
        )
'''
    assert code_lines(source) == 6


def test_a_string_that_is_not_a_docstring_is_code() -> None:
    assert code_lines('text = """one\n\ntwo\n"""\n') == 3


def test_a_file_that_is_too_long_is_seen() -> None:
    assert code_lines("x = 1\n" * (MOST_CODE_LINES + 1)) > MOST_CODE_LINES
