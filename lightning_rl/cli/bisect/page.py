"""The page of a bisection: curve, cause and rollouts, as HTML that loads and runs nothing."""

from collections.abc import Iterator
from html import escape

from lightning_rl.cli.bisect.search import Bisection
from lightning_rl.cli.rerun.retraining import Seen
from lightning_rl.cli.still import still_page
from lightning_rl.rollout import as_text

_WIDTH, _HEIGHT, _EDGE = 760, 220, 34
SHOWN = 40
"""Rollouts on the page at most, those with the largest absolute advantages."""


def page_of(verdict: Bisection, name: str) -> str:
    """Return the page of a bisection of the run of this name."""
    lines = "".join(f"<li>{escape(line)}</li>" for line in list(verdict.lines())[1:])
    note = "the recorded curve; dashed: the iteration; green: without the cause"
    chart = f"<div class='card chart'>{curve_of(verdict)}<p class='soft'>{note}</p></div>"
    rollouts = _table(verdict) if verdict.suspects else ""
    return still_page("bisect", name, verdict.headline, f"{chart}<ul>{lines}</ul>{rollouts}")


def curve_of(verdict: Bisection) -> str:
    """Return the recorded curve as SVG, with the iteration, and the value without its cause."""
    curve, recovered = verdict.curve, verdict.recovered
    numbers = sorted(curve)
    values = [*curve.values(), *([] if recovered is None else [recovered.after])]
    low, high = min(values), max(values)

    def place(number: int, value: float) -> str:
        x = (number - numbers[0]) / max(1, numbers[-1] - numbers[0])
        y = (value - low) / ((high - low) or 1.0)
        wide, high_up = _WIDTH - 2 * _EDGE, _HEIGHT - 2 * _EDGE
        return f"{_EDGE + x * wide:.1f},{_HEIGHT - _EDGE - y * high_up:.1f}"

    parts = [_line("var(--accent)", " ".join(place(n, curve[n]) for n in numbers))]
    if verdict.iteration is not None:
        ends = [place(verdict.iteration, value) for value in (low, high)]
        parts.append(_line("var(--bad)", " ".join(ends), " stroke-dasharray='4 3'"))
    if verdict.tried is not None and recovered is not None and verdict.iteration is not None:
        begin = max((n for n in numbers if n < verdict.iteration), default=numbers[0])
        ends = [place(begin, curve[begin]), place(verdict.tried, recovered.after)]
        parts.append(_line("var(--good)", " ".join(ends)))
    for number in (numbers[0], numbers[-1]):
        x = place(number, low).partition(",")[0]
        parts.append(f"<text x='{x}' y='{_HEIGHT - 10}' text-anchor='middle'>{number}</text>")
    for value in (low, high):
        y = place(numbers[0], value).partition(",")[2]
        parts.append(f"<text x='2' y='{y}'>{value:.2g}</text>")
    return (
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='the curve'>"
        f"{''.join(parts)}</svg>"
    )


def _line(colour: str, points: str, more: str = "") -> str:
    return f"<polyline fill='none' stroke='{colour}' stroke-width='2' points='{points}'{more}/>"


def _table(verdict: Bisection) -> str:
    shown = sorted(verdict.suspects, key=lambda seen: -seen.mass)[:SHOWN]
    whole = sum(seen.mass for seen in verdict.suspects) or 1.0
    rows = "".join(f"<tr>{''.join(_cells(seen, whole))}</tr>" for seen in shown)
    more = len(verdict.suspects) - len(shown)
    rest = f"<p class='soft'>and {more} more with smaller advantages</p>" if more else ""
    names = ("rollout", "prompt", "answer", "reward", "parts", "advantage", "share of theirs")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<div class='card list'><table><tr>{head}</tr>{rows}</table></div>{rest}"


def _cells(seen: Seen, whole: float) -> Iterator[str]:
    rollout = seen.rollout
    parts = ", ".join(f"{name} {value:g}" for name, value in rollout.reward_parts.items()
                      if value is not None)  # fmt: skip
    yield f"<td class='mono'>{escape(rollout.id)}</td>"
    for content in (rollout.prompt.prompt, rollout.completion):
        yield f"<td class='mono'>{escape(as_text(content))}</td>"
    for cell in (f"{seen.reward:g}", parts, f"{seen.advantage:+.3g}", f"{seen.mass / whole:.1%}"):
        yield f"<td>{escape(cell)}</td>"
