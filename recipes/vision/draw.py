"""Draw questions about pictures: count shapes, read a number, find the odd one out.

Each task draws a picture of 56 to 84 pixels a side, and knows the answer. Sides are multiples of
28, the side of what becomes one token of the model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

COLORS = {
    "red": (214, 40, 40),
    "green": (42, 157, 70),
    "blue": (40, 84, 214),
    "black": (30, 30, 30),
}
SHAPES = ("circle", "square", "triangle")
PAPERS = [(255, 255, 255), (246, 240, 222), (226, 236, 246)]
MOST_COUNTED = 4


@dataclass(frozen=True)
class Question:
    """A picture, what is asked about it, the only right answer, and what others would say.

    ``other`` counts from zero, reads from right to left, or names the column before the row. The
    question does not tell which is meant.
    """

    task: str
    picture: Image.Image
    text: str
    answer: str
    other: str


def count(rng: random.Random) -> Question:
    """Ask how many shapes of one colour there are among others; none overlap."""
    asked, *others = rng.sample(list(COLORS), len(COLORS))
    wanted = rng.randint(1, MOST_COUNTED)
    colors = [asked] * wanted + rng.choices(others, k=rng.randint(0, 2))
    picture, pen = _paper(rng, 84, 56)
    cells = rng.sample([(x, y) for x in range(3) for y in range(2)], len(colors))
    for color, (x, y) in zip(colors, cells, strict=True):
        centre = 28 * x + 14 + rng.uniform(-3, 3), 28 * y + 14 + rng.uniform(-3, 3)
        _shape(pen, rng.choice(SHAPES), centre, rng.uniform(8, 10), COLORS[color])
    return Question("count", picture, f"How many {asked} shapes?", str(wanted), str(wanted - 1))


def read(rng: random.Random) -> Question:
    """Ask which two-digit number is written."""
    number = str(rng.randint(10, 99))
    picture, pen = _paper(rng, 56, 56)
    font = ImageFont.load_default(rng.randint(36, 42))
    centre = 28 + rng.uniform(-3, 3), 28 + rng.uniform(-6, 6)
    pen.text(centre, number, font=font, fill=COLORS[rng.choice(list(COLORS))], anchor="mm")
    return Question("read", picture, "Which number?", number, number[::-1])


def odd(rng: random.Random) -> Question:
    """Ask where in a grid of equal shapes the odd one is, which differs in colour or shape."""
    shape, other_shape = rng.sample(SHAPES, 2)
    color, other_color = rng.sample(list(COLORS), 2)
    by_color = rng.random() < 0.5
    columns, rows = rng.choice([(2, 2), (2, 3), (3, 2)])
    place = rng.randrange(columns), rng.randrange(rows)
    picture, pen = _paper(rng, 28 * columns, 28 * rows)
    for x in range(columns):
        for y in range(rows):
            differs = (x, y) == place
            centre = 28 * x + 14 + rng.uniform(-2, 2), 28 * y + 14 + rng.uniform(-2, 2)
            kind = other_shape if differs and not by_color else shape
            fill = other_color if differs and by_color else color
            _shape(pen, kind, centre, 9, COLORS[fill])
    column, row = place[0] + 1, place[1] + 1
    return Question("odd", picture, "Where is the odd one?", f"{row},{column}", f"{column},{row}")


TASKS: dict[str, Callable[[random.Random], Question]] = {"count": count, "read": read, "odd": odd}


def _paper(rng: random.Random, width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    picture = Image.new("RGB", (width, height), rng.choice(PAPERS))
    return picture, ImageDraw.Draw(picture)


def _shape(
    pen: ImageDraw.ImageDraw,
    shape: str,
    centre: tuple[float, float],
    radius: float,
    fill: tuple[int, int, int],
) -> None:
    x, y = centre
    if shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    elif shape == "square":
        side = radius * math.sqrt(math.pi) / 2  # of the circle's area
        pen.rectangle((x - side, y - side, x + side, y + side), fill=fill)
    else:
        pen.regular_polygon((x, y, radius * 1.2), 3, fill=fill)
