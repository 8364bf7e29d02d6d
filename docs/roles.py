"""A hook of MkDocs: docstrings say :class:`X`, of which a page shows X as code."""

import re
from typing import Any

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):<code>[~.]?([\w.]+)</code>")


def on_page_content(html: str, **page: Any) -> str:
    """Called with every page when it is HTML."""
    return ROLE.sub(r"<code>\1</code>", html)
