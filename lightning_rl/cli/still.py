"""A page in the viewer's style that loads and runs nothing, for the result of another command."""

from html import escape
from importlib.resources import files


def still_page(command: str, name: str, headline: str, body: str) -> str:
    """Return the page of a command's result on what has this name; ``body`` is HTML, the rest text.

    Nothing in it is executed, whatever a model has written, as long as ``body`` escapes that.
    """
    style = files("lightning_rl.cli.view").joinpath("page.css").read_text(encoding="utf-8")
    said = {"command": command, "name": name, "headline": headline}
    return _PAGE.format(**{key: escape(text) for key, text in said.items()}, style=style, body=body)


_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{command} {name}: {headline}</title><style>
{style}</style></head><body><header><h1>lightning-rl <span>{command} {name}</span></h1></header>
<main><h2>{headline}</h2>{body}</main></body></html>
"""
