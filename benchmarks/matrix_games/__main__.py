"""Where do learners end that take each other into account, and where those that do not?

    python -m benchmarks.matrix_games [--steps 1.0] [--save]

Four games of two players whose losses are known exactly, so nothing is sampled. The starting points
of a game are the same for all updates.

- Matching pennies, each player with the logit of "heads". The only equilibrium is to throw a fair
  coin. Shown: how far probabilities are from 1/2, the larger one.
- The duopoly of von Stackelberg 1934: two firms make quantities x and y, and earn x (1 - x - y)
  and y (1 - x - y). Where neither leads both make 1/3; a leader makes 1/2, and the other 1/4, which
  is the best answer. Shown: the distance from there.
- The tandem game of Letcher et al. 2019: L_i = (x + y)^2 - 2 x_i. Fixed points are all with
  x + y = 1. Shown: |x + y - 1|.
- The iterated prisoner's dilemma as Foerster et al. 2018 have it, discount 0.96: probabilities to
  cooperate at the begin, and after each pair of actions; -1 each if both cooperate, -2 if both
  defect, -3 and 0 if one does. Shown: what both lose per step. To defect, 2, is an equilibrium, and
  "tit for tat", 1, is another.

The last line is JSON: of each game and update the mean over starting points and the last tenth of
the steps. ``--steps`` is a factor on the number of steps. ``--save`` also writes the table and the
figure of docs/games.md. Takes about a minute.
"""

from pathlib import Path

from benchmarks.matrix_games.games import measured, summary, table
from benchmarks.matrix_games.plot import draw
from benchmarks.support.results import parser_of, report, write_block

PAGE = Path(__file__).parents[2] / "docs" / "games.md"
FIGURE = Path(__file__).parents[2] / "docs" / "images" / "matrix-games.png"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=float, default=1.0, help="factor on the number of steps")
    arguments = parser.parse_args()
    curves = measured(arguments.steps)
    result = summary(curves)
    print("\n".join(table(result)))
    if arguments.save:
        draw(curves, str(FIGURE))
        write_block(PAGE, "matrix-games", table(result))
    report("matrix-games", result, arguments.save)


if __name__ == "__main__":
    main()
