"""Products of estimates: the expectation of an update over all batches that there are, exactly."""

from itertools import product

import pytest
import torch
from torch.distributions import Bernoulli

from lightning_rl.errors import ConfigError
from lightning_rl.games import LOLA, POLA, PSOS, PSPG, SOS, SPG, CrossFitted, Game, GameUpdate
from lightning_rl.games.algos.moves import game_loss
from lightning_rl.games.algos.scores import GamePlayer, ScoreGame

UPDATES = [SPG(), PSPG(), LOLA(), POLA(), SOS(), PSOS()]
LOGITS = torch.tensor([0.4, -0.7, 0.2], dtype=torch.double)
PAYS = torch.tensor(
    [[3.0, -1.0, 0.5, 2.0, -1.5, 1.0, 4.0, -2.0], [1.0, 2.5, -3.0, 0.5, 2.0, -1.0, 0.0, 1.5],
     [-1.0, 2.0, 1.5, -2.5, 3.0, 0.5, -0.5, 2.0]]
).double()  # fmt: skip
"""The payoffs of three players, or the first two, in each outcome as a binary number."""


def draw():
    return torch.Generator().manual_seed(0)


def parameters(count):
    return [
        torch.tensor([logit], dtype=torch.double, requires_grad=True) for logit in LOGITS[:count]
    ]


def outcomes(count):
    """Return all that the players can do, (2^n, n), and how likely each is."""
    acts = torch.tensor(list(product((0.0, 1.0), repeat=count))).double()
    chances = LOGITS[:count].sigmoid()
    return acts, (acts * chances + (1 - acts) * (1 - chances)).prod(1)


def batches(count, episodes):
    """Yield each batch of outcomes' numbers (N,) that can be, and its probability."""
    _, chances = outcomes(count)
    for batch in product(range(len(chances)), repeat=episodes):
        chosen = torch.tensor(batch)
        yield chosen, chances[chosen].prod()


def order_of(count):
    return [[place] for place in range(count)]


def exact(count, order):
    """Return the game whose losses are expectations."""
    players = parameters(count)
    acts, _ = outcomes(count)
    logprobs = Bernoulli(logits=torch.cat(players)).log_prob(acts).sum(1)
    losses = [-(logprobs.exp() * pays[: len(acts)]).sum() for pays in PAYS[:count]]
    return Game(losses, [[p] for p in players], [0.3] * count, order)


def sampled_losses(logprobs, chosen):
    """Return the losses of one-step episodes, whose outcomes have ``logprobs`` (N,)."""
    advantages = PAYS[:, chosen]
    steps = [LOLA().step_loss(logprobs, {"advantages": a})[0] for a in advantages]
    return [game_loss(step[:, None], torch.zeros_like(step)[:, None]) for step in steps]


def twice_differentiated(count, order, chosen):
    """Return the game of these episodes, by double backward."""
    players = parameters(count)
    acts = outcomes(count)[0][chosen]
    logprobs = Bernoulli(logits=torch.cat(players)).log_prob(acts).sum(1)
    losses = sampled_losses(logprobs, chosen)[:count]
    return Game(losses, [[p] for p in players], [0.3] * count, order)


class Coin(GamePlayer):
    """A player of one parameter: of log probabilities the slope is a - p, the bend -p (1 - p)."""

    def __init__(self, logit, acts, advantages):
        chance = logit.detach().sigmoid()
        self.scores, self.bending = acts - chance, -chance * (1 - chance)
        self.advantages = advantages

    def own(self):
        return self.gradient(-self.advantages / len(self.advantages))

    def gradient(self, weights):
        return (self.scores @ weights).reshape(1)

    def along(self, vector):
        return self.scores * vector

    def bend(self, weights, change, vector):
        return self.gradient(change) + weights.sum() * self.bending * vector


def by_scores(count, order, chosen):
    """Return the game of these episodes by what players did: the adapters' form."""
    acts = outcomes(count)[0][chosen]
    logits = parameters(count)
    players = [Coin(logits[i], acts[:, i], PAYS[i, chosen]) for i in range(count)]
    joint = Bernoulli(logits=torch.cat(logits)).log_prob(acts).sum(1).detach()
    logprobs = [torch.zeros_like(joint).requires_grad_() for _ in players]
    losses = sampled_losses(joint + sum(logprobs), chosen)[:count]
    return ScoreGame(losses, logprobs, players, [0.3] * count, order)


FORMS = pytest.mark.parametrize("form", [twice_differentiated, by_scores])


def crossed(form, count, order, chosen, parts):
    cut = chosen.tensor_split(parts)
    shares = [len(part) / len(chosen) for part in cut]
    return CrossFitted([made_once(form, count, order, *part.tolist()) for part in cut], shares)


GAMES = {}


def made_once(form, count, order, *chosen):
    key = form, count, order is None, chosen
    if key not in GAMES:
        GAMES[key] = form(count, order, torch.tensor(chosen))
    return GAMES[key]


def expectation(function, count, episodes):
    """Return the expectation of a function of a batch, over all batches."""
    found = [chance * function(chosen) for chosen, chance in batches(count, episodes)]
    return torch.stack(found).sum(0)


def fixed(point, follower, vector):
    """Answer without knowing the episodes."""
    return -0.7 * vector


def test_two_factors_from_the_same_episodes_are_biased_by_this_much():
    acts, chances = outcomes(2)
    score_g, score_f = (acts - LOGITS[:2].sigmoid()).T
    pay_g, pay_f = PAYS[:2, :4]
    mixed = (chances * pay_f * score_f * score_g).sum()
    slope = (chances * pay_g * score_f).sum()
    alike = (chances * pay_f * pay_g * score_f**2 * score_g).sum()
    leads = order_of(2)
    for episodes in (1, 2, 3):

        def shaping(chosen):
            return twice_differentiated(2, leads, chosen).shaping(0, lambda _, f, v: v)

        found = expectation(shaping, 2, episodes)
        formula = (1 - 1 / episodes) * mixed * slope + alike / episodes
        assert float(found) == pytest.approx(float(formula), abs=1e-14)
        wanted = exact(2, leads).shaping(0, lambda _, f, v: v)
        assert float(wanted) == pytest.approx(float(mixed * slope), abs=1e-14)
        assert abs(float(found - wanted)) > abs(float(wanted))


@FORMS
@pytest.mark.parametrize("episodes", [2, 3])
def test_factors_from_different_episodes_are_unbiased(form, episodes):
    game = exact(2, None)
    wanted = [game.shaping(0, fixed), game.foresight(1, game.rates), *LOLA()(game, draw())]
    update = LOLA(bound=None)

    def found(chosen):
        estimate = crossed(form, 2, None, chosen, 2)
        terms = [estimate.shaping(0, fixed), estimate.foresight(1, estimate.rates)]
        return torch.cat([*terms, *update(estimate, draw())])

    mean = expectation(found, 2, episodes)
    torch.testing.assert_close(mean, torch.cat(wanted).detach(), rtol=0, atol=1e-14)


@FORMS
def test_so_are_three_factors_where_players_are_of_three_levels(form):
    order = order_of(3)
    wanted = exact(3, order).shaping(0, fixed)

    def mean(parts):
        def found(chosen):
            return crossed(form, 3, order, chosen, parts).shaping(0, fixed)

        return expectation(found, 3, 3)

    torch.testing.assert_close(mean(3), wanted, rtol=0, atol=1e-13)
    with pytest.raises(ConfigError, match=r"a product of 3 estimates needs as many parts .* are 2"):
        mean(2)


@FORMS
def test_an_inverse_keeps_its_own_bias_but_is_multiplied_by_no_other(form):
    """E[M (H + rho)^-1 v] is M times E[(H + rho)^-1 v], and that is not (E[H] + rho)^-1 E[v]."""
    order, rho, episodes = order_of(2), 1.0, 2
    update = SPG(rho=rho, bound=None)
    game = exact(2, order)

    def answered(chosen):
        part = form(2, order, chosen)
        one = torch.ones(1).double()
        return part.gradient(0, 1).detach() / (part.mixed(1, 1, 1, one) + rho)

    def found(chosen):
        return update(crossed(form, 2, order, chosen, 2), draw())[0]

    mean = expectation(found, 2, episodes)
    of_one = expectation(answered, 2, 1)  # each part has one of the two episodes
    own = game.gradient(0, 0).detach()
    torch.testing.assert_close(mean, own - game.mixed(1, 1, 0, of_one), rtol=0, atol=1e-14)
    assert abs(float(mean - update(game, draw())[0])) > 1e-3


@FORMS
def test_sos_is_unbiased_as_long_as_it_weighs_all_batches_alike(form):
    """Its p, min(p_1, p_2), is a ratio of estimates: 1 in every batch at the first rate."""
    for rate, unbiased in ((0.3, True), (1.0, False)):
        update = SOS(rate=rate, bound=None, b=1e-6)
        lola = LOLA(rate=rate, bound=None)
        wanted = torch.cat(update(exact(2, None), draw()))

        def found(chosen, update=update):
            return torch.cat(update(crossed(form, 2, None, chosen, 2), draw()))

        def same_as_lola(chosen, found=found, lola=lola):
            theirs = torch.cat(lola(crossed(form, 2, None, chosen, 2), draw()))
            return torch.isclose(found(chosen), theirs, rtol=1e-12, atol=1e-14).all()

        weighed_alike = all(same_as_lola(chosen) for chosen, _ in batches(2, 2))
        off = float((expectation(found, 2, 2) - wanted).abs().max())
        assert weighed_alike == unbiased
        assert off < 1e-14 if unbiased else off > 1e-3


# ---------------------------------------------------------------- the bound

BATCH = torch.tensor([0, 3, 2, 1, 3, 0])


@pytest.mark.parametrize("update", UPDATES, ids=lambda u: type(u).__name__)
@FORMS
def test_what_is_added_is_no_longer_than_the_bound(update, form):
    kind = type(update)
    estimate = crossed(form, 2, order_of(2), BATCH, 2)
    free = kind(bound=None).moves(estimate, draw())[0]
    share = float(free.added.norm() / free.own.norm())
    assert share > 0
    assert free.metrics["policy/shaping"].tolist() == pytest.approx([share])
    assert free.metrics["policy/shaping_cut"].tolist() == [0]
    for times, kept, cut in ((0.5, 0.5, 1), (2.0, 1.0, 0)):
        move = kind(bound=times * share).moves(estimate, draw())[0]
        torch.testing.assert_close(move.direction, free.own + kept * free.added)
        assert move.metrics["policy/shaping"].tolist() == pytest.approx([share])
        assert move.metrics["policy/shaping_cut"].tolist() == [cut]
    assert kind().bound == 1


def test_losses_that_are_known_exactly_are_not_bounded():
    game = exact(2, order_of(2))
    for update, free in ((SPG(bound=1e-3), SPG(bound=None)), (LOLA(bound=1e-3), LOLA(bound=None))):
        torch.testing.assert_close(update(game, draw()), free(game, draw()))


def test_without_a_gradient_of_its_own_a_player_stays_where_it_is():
    nothing = torch.zeros(1).double()
    game = CrossFitted([exact(2, order_of(2))], [1.0], [nothing, nothing])
    parts = CrossFitted(game.parts * 2, [0.5, 0.5], game.own)
    move = SPG().moves(parts, draw())[0]
    assert float(move.added) != 0
    assert move.direction.tolist() == [0]
    assert move.metrics["policy/shaping"].tolist() == [0]


@pytest.mark.parametrize("bound", [0, -1.0])
def test_a_bound_that_allows_nothing_is_refused(bound):
    with pytest.raises(ConfigError, match=r"bound=.* must be > 0: .* null for no bound"):
        LOLA(bound=bound)


# ---------------------------------------------------------------- parts


def test_the_whole_is_the_mean_of_its_parts():
    """The first part has two of three episodes."""
    chosen, vector = torch.tensor([0, 3, 2]), torch.tensor([0.5]).double()
    for form in (twice_differentiated, by_scores):
        whole, cut = form(2, None, chosen), crossed(form, 2, None, chosen, 2)
        assert cut.shares == [2 / 3, 1 / 3]
        for of, by in product(range(2), repeat=2):
            torch.testing.assert_close(cut.gradient(of, by), whole.gradient(of, by))
            mixed = cut.mixed(of, by, 1, vector), whole.mixed(of, by, 1, vector)
            torch.testing.assert_close(*mixed)


def test_episodes_are_in_as_many_parts_as_an_update_has_factors():
    class Squares(GameUpdate):
        factors = 3

        def __call__(self, game, draw):
            raise NotImplementedError

    assert LOLA().parts(None, 3) == 2
    assert SPG().parts([[0], [1, 2]], 3) == 2
    assert SPG().parts([[0], [1], [2]], 3) == 3
    assert SPG().parts([[0, 1]], 2) == 1
    assert LOLA().parts(None, 1) == 1
    assert Squares().parts(None, 2) == 3
    assert Squares().parts([[0, 1]], 2) == 3
