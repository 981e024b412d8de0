"""For the site: links that leave docs/, such as ../CHANGELOG.md, lead to the repository."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\]\((?:\.\./)+(?=[\w.])([^)#]+)((?:#[^)]*)?)\)")
_ROOT_FOLDERS = ("benchmarks/", "examples/", "keyhole/", "tests/")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page; gives the text with such links replaced."""

    def replaced(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2]
        inside = not (path.isupper() or path.startswith(_ROOT_FOLDERS) or path in _ROOT_FILES)
        return link[0] if inside else f"]({config['repo_url']}/blob/main/{path}{anchor})"

    return _OUTSIDE.sub(replaced, markdown)


_ROOT_FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "CITATION.cff")
