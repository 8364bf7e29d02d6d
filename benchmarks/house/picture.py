"""Draw a house's floor plan as an SVG picture: a floor per row, the ground floor at the bottom."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from textwrap import wrap

WIDTH, HEIGHT, GAP, LABEL = 248, 80, 10, 22
COLORS = ("#e8eef7", "#e3f1ea", "#fdf1dc", "#fbe3d6", "#f3e2f1", "#e4e7ee", "#dde3ea")


def draw(floors: Mapping[str, Sequence[str]], captions: Mapping[str, str]) -> str:
    """Draw ``floors`` from the ground up, each with its rooms; ``captions`` has a sentence each."""
    widest = max(map(len, floors.values()))
    width = widest * (WIDTH + GAP) + GAP
    height = len(floors) * (HEIGHT + LABEL + GAP) + GAP
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (title, rooms) in enumerate(floors.items()):
        top = height - (number + 1) * (HEIGHT + LABEL + GAP)
        shapes.append(f'<text x="{GAP}" y="{top + 15}" fill="#555">{escape(title)}</text>')
        room_width = (width - GAP) / len(rooms) - GAP
        for place, name in enumerate(rooms):
            left = GAP + place * (room_width + GAP)
            shapes += _room(left, top + LABEL, room_width, name, captions[name], COLORS[number])
    return "\n".join([*shapes, "</svg>\n"])


def _room(
    left: float, top: float, width: float, name: str, caption: str, color: str
) -> Iterator[str]:
    yield (
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{HEIGHT}" rx="6" '
        f'fill="{color}" stroke="#8a93a0"/>'
    )
    yield f'<text x="{left + 10:g}" y="{top + 20:g}" font-weight="bold">{escape(name)}</text>'
    for number, line in enumerate(wrap(caption, int(width / 7))):
        yield f'<text x="{left + 10:g}" y="{top + 38 + 15 * number:g}">{escape(line)}</text>'
