"""Test the benchmark on matrix games, shortened: who cycles, who comes to rest, and where."""

import json

import pytest
import torch

from benchmarks.matrix_games.__main__ import PAGE, main
from benchmarks.matrix_games.games import SETTINGS, UPDATES, at_end, dilemma, mean_loss, table
from benchmarks.support.results import RESULTS


def ends(game, update, steps):
    curve = SETTINGS[game].curve(UPDATES[update], 0, steps)
    return curve[0], at_end([curve])


def test_who_does_not_look_at_the_other_cycles_away():
    first, last = ends("pennies", "Simultaneous", 60)
    assert last > first
    for update in ("SPG", "LOLA", "SOS"):
        first, last = ends("pennies", update, 60)
        assert last < 0.6 * first


def test_where_they_come_to_rest_by_hand():
    # Simultaneous and stable: s = x + y with 2 s - 2 = 0. LOLA: 2 s - 2 - 0.1 (4 s + 4 s - 4) = 0.
    rests = {"Simultaneous": 0, "SOS": 0, "LOLA": 1 / 3}
    for update, distance in rests.items():
        assert ends("tandem", update, 80)[1] == pytest.approx(distance, abs=1e-3)
    # The leader: 2 x + y - 1 - x / (2 + rho) = 0, with y = (1 - x) / 2. Without one both make 1/3.
    x = 0.5 / (1.5 - 1 / 2.1)
    distance = ((x - 1 / 2) ** 2 + ((1 - x) / 2 - 1 / 4) ** 2) ** 0.5
    assert ends("duopoly", "SPG", 120)[1] == pytest.approx(distance, abs=1e-4)
    nash = ((1 / 6) ** 2 + (1 / 12) ** 2) ** 0.5
    assert ends("duopoly", "Simultaneous", 100)[1] == pytest.approx(nash, abs=1e-3)


def test_the_dilemmas_losses_by_hand():
    always = torch.full((5,), 40.0).double()
    tit_for_tat = torch.tensor([40.0, 40, -40, 40, -40]).double()
    assert mean_loss(always, always) == pytest.approx(1)
    assert mean_loss(-always, -always) == pytest.approx(2)
    assert mean_loss(tit_for_tat, tit_for_tat) == pytest.approx(1)
    # The first round costs the one that trusts 3, all others both 2; 0.96 of 25 rounds are others.
    one, other = (float(loss) for loss in dilemma(tit_for_tat, -always))
    assert one == pytest.approx(3 + 2 * 24)
    assert other == pytest.approx(0 + 2 * 24)


def test_the_page_has_the_saved_table_and_the_command_says_json_last(monkeypatch, capsys):
    saved = json.loads((RESULTS / "matrix-games-cpu.json").read_text())["result"]
    page = PAGE.read_text(encoding="utf-8")
    assert "\n".join(table(saved)) in page
    monkeypatch.setattr("sys.argv", ["matrix_games", "--steps", "0.01"])
    main()
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(last) == list(SETTINGS)
    assert all(list(rows) == list(UPDATES) for rows in last.values())
