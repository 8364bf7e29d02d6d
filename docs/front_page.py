"""A hook of MkDocs: the site begins with the README, which is the front page of the repository."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
IN_DOCS = re.compile(r"\]\(docs/")
OF_A_RECIPE = re.compile(r"\[([^\]]+)\]\((recipes/\w+)/README\.md\)")
ELSEWHERE = re.compile(r"\[([^\]]+)\]\((?!https?:|docs/)[\w./-]+\)")


def front_page(readme: str) -> str:
    """The README with its links as seen from ``docs``; what is outside of it is named."""
    page = OF_A_RECIPE.sub(r"\1 (`\2`)", readme)
    return IN_DOCS.sub("](", ELSEWHERE.sub(r"\1", page))


def on_page_markdown(markdown: str, page: Any, **site: Any) -> str:
    """Called with every page before it is HTML."""
    return front_page(README.read_text(encoding="utf-8")) if page.is_homepage else markdown
