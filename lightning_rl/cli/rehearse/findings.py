"""The findings of a rehearsal, and its verdict as text and as a page."""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The groups of a verdict, in its order."""

    FAILS = "would fail"
    WASTES = "would waste"
    UNTRIED = "could not be tried"
    TRIED = "tried"


@dataclass(frozen=True)
class RunFinding:
    """A sentence on the run, and the ``key`` of the configuration that it is about; "" for none."""

    kind: Kind
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" if self.key else self.text


@dataclass(frozen=True)
class RunVerdict:
    """All findings on a run of this ``name``."""

    name: str
    findings: Sequence[RunFinding]

    @property
    def status(self) -> int:
        """The exit status: 2 if the run would fail, 1 if it would waste, else 0."""
        kinds = {finding.kind for finding in self.findings}
        return 2 if Kind.FAILS in kinds else 1 if Kind.WASTES in kinds else 0

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        return {
            0: "nothing was found that would harm the run",
            1: "the run would waste some of what it costs",
            2: "the run would fail, or learn what it should not",
        }[self.status]

    def of(self, kind: Kind) -> list[RunFinding]:
        """Return the findings of a kind."""
        return [finding for finding in self.findings if finding.kind is kind]

    def lines(self) -> Iterator[str]:
        """Yield lines of text for the user."""
        yield f"rehearsal of {self.name}: {self.headline}"
        for kind in Kind:
            if found := self.of(kind):
                yield f"{kind.value}:"
                yield from (f"  - {finding}" for finding in found)

    def page(self) -> str:
        """Return the verdict as an HTML page without scripts."""
        sections = "".join(
            f'<section class="{kind.name.lower()}"><h2>{kind.value}</h2><ul>'
            + "".join(f"<li>{_item(finding)}</li>" for finding in found)
            + "</ul></section>"
            for kind in Kind
            if (found := self.of(kind))
        )
        return _PAGE.format(
            name=html.escape(self.name), headline=self.headline, status=self.status, body=sections
        )


def _item(finding: RunFinding) -> str:
    key = f"<code>{html.escape(finding.key)}</code> " if finding.key else ""
    return key + html.escape(finding.text)


_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Rehearsal of {name}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c2733; background: #fff }}
h1 {{ font-size: 1.4rem; margin-bottom: 0 }} p {{ margin: .2rem 0 1.5rem; font-size: 1.1rem }}
.s0 {{ color: #2b7a3d }} .s1 {{ color: #a05a00 }} .s2 {{ color: #b3261e }}
section {{ border-left: 4px solid #bbb; padding: .1rem 1rem; margin: 1rem 0 }}
.fails {{ border-color: #b3261e }} .wastes {{ border-color: #d98200 }}
.tried {{ border-color: #2b7a3d }} h2 {{ font-size: 1rem; margin: .3rem 0 }}
code {{ background: #eef1f4; padding: 0 .3em; border-radius: 3px; font-size: .9em }}
</style></head><body><h1>Rehearsal of {name}</h1><p class="s{status}">{headline}</p>{body}
</body></html>
"""
