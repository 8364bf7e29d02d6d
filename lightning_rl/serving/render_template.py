"""Renders a chat template: JSON from standard input, the text to standard output.

Run by a :class:`Launcher` that has imported transformers' renderer, so that it starts at once.
"""

import json
import sys

from transformers.utils.chat_template_utils import render_jinja_template


def main() -> int:
    """Render the template; return 0, or 1 with the reason on standard error."""
    given = json.load(sys.stdin.buffer)
    try:
        texts, _ = render_jinja_template(chat_template=given["template"], **given["variables"])
        sys.stdout.buffer.write(texts[0].encode())
    except Exception as error:  # a template may raise anything
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
