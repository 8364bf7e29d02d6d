"""Test updates in games: by hand, against numerical differentiation, and from sampled steps."""

from functools import partial

import pytest
import torch

from lightning_rl import PPOClip
from lightning_rl.errors import ConfigError
from lightning_rl.games import LOLA, POLA, PSOS, PSPG, SOS, SPG, Simultaneous
from lightning_rl.games.algos.game import Game, flat, nystrom_solve
from lightning_rl.games.algos.moves import game_loss, said_before
from lightning_rl.games.algos.updates import sos_weight

UPDATES = [Simultaneous(), SPG(), PSPG(), LOLA(), POLA(), SOS(), PSOS()]


def draw():
    return torch.Generator().manual_seed(0)


def point(*values):
    return torch.tensor(values, dtype=torch.double, requires_grad=True)


def tandem(x, y, order=None, rate=0.1):
    """Return two losses: each wants to be far, and both want x + y = 0 (Letcher et al. 2019, the
    tandem game).
    """
    losses = [((x + y) ** 2 - 2 * x).sum(), ((x + y) ** 2 - 2 * y).sum()]
    return Game(losses, [[x], [y]], [rate, rate], order)


def test_the_tandem_game_by_hand():
    game = tandem(point(0.3), point(-0.2))
    # x + y = 0.1: a player's own gradient is 2 * 0.1 - 2, by the other 2 * 0.1; all second ones 2.
    assert [float(v) for v in Simultaneous()(game, draw())] == pytest.approx([-1.8, -1.8])
    # h = 2 * -1.8 and chi = 0.2 * 2; -1.8 - 0.1 (0.4 - 3.6)
    assert [float(v) for v in LOLA()(game, draw())] == pytest.approx([-1.48, -1.48])
    assert [float(v) for v in LOLA(rate=0.5)(game, draw())] == pytest.approx([-0.2, -0.2])
    # Only the first leads: -1.8 - 0.2 * 2 / (2 + 0.1)
    game = tandem(point(0.3), point(-0.2), [[0], [1]])
    assert [float(v) for v in SPG()(game, draw())] == pytest.approx([-1.8 - 0.4 / 2.1, -1.8])
    assert [float(v) for v in LOLA()(game, draw())] == pytest.approx([-1.48, -1.8])


def test_matching_pennies_by_hand():
    # L_1 = x y = -L_2: own gradients y and -x, the other's x and -y, mixed derivatives 1 and -1.
    x, y = point(0.5), point(0.25)
    losses = [(x * y).sum(), -(x * y).sum()]
    game = Game(losses, [[x], [y]], [0.1, 0.1])
    # Player 1: h = 1 * -x, chi = x * -1, so y + 0.1 * 2 x; player 2: -x + 0.1 * 2 y.
    assert [float(v) for v in LOLA()(game, draw())] == pytest.approx([0.35, -0.45])
    game = Game(losses, [[x], [y]], [0.1, 0.1], [[0], [1]])
    # The follower's loss has no curvature: y - x * -1 / rho
    assert [float(v) for v in SPG()(game, draw())] == pytest.approx([0.25 + 5, -0.5])


def test_weights_of_stable_opponent_shaping_by_hand():
    ahead = torch.tensor([1.0, 0.0])
    far, near = torch.tensor([3.0, 0.0]), torch.tensor([0.06, 0.0])
    along, against = torch.tensor([0.5, 9.0]), torch.tensor([-2.0, 1.0])
    assert float(sos_weight(far, ahead, along, 0.5, 0.1)) == 1
    assert float(sos_weight(far, ahead, against, 0.5, 0.1)) == 0.25  # 0.5 * 1 / 2
    assert float(sos_weight(far, ahead, against / 8, 0.5, 0.1)) == 1  # 0.5 * 1 / 0.25, cut
    assert float(sos_weight(near, ahead, along, 0.5, 0.1)) == pytest.approx(0.0036)
    assert float(sos_weight(near, ahead, 1000 * against, 0.5, 0.1)) == pytest.approx(0.00025)


def smooth(*players):
    """Return losses of several players without any symmetry."""
    numbers = torch.arange(1.0, 40.0, dtype=torch.double)
    everything = torch.cat(players)
    size = len(everything)
    mix = torch.sin(numbers[:size].outer(numbers[:size]))
    return [
        torch.sin(mix[i] @ everything)
        + 0.5 * everything @ (mix @ torch.cos((i + 1) * everything))
        + (everything**2 @ mix[:, i]) * players[i].sum()
        for i in range(len(players))
    ]


def numerical(function, at, delta=1e-4):
    """Return central differences of a scalar function of a vector."""
    steps = delta * torch.eye(len(at), dtype=at.dtype)
    return torch.stack([(function(at + s) - function(at - s)) / (2 * delta) for s in steps])


def moved(players, which, rate):
    """Return parameters after a gradient step of one player on its own loss."""
    point = [p.detach().requires_grad_() for p in players]
    return (
        point[which].detach() - rate * torch.autograd.grad(smooth(*point)[which], point[which])[0]
    )


def test_shaping_and_foresight_are_the_derivative_of_what_follows_a_step():
    x, y = point(0.3, -0.5, 0.2), point(0.7, 0.1)
    game = Game(smooth(x, y), [[x], [y]], [1.0, 1.0])

    def after(other, rate):
        return smooth(other, moved([other, y], 1, rate))[0]

    slope = [numerical(lambda v, r=r: after(v, r), x.detach()) for r in (1e-4, -1e-4)]
    expected = (slope[0] - slope[1]) / 2e-4
    terms = game.foresight(0, game.rates) + game.shaping(0, lambda _, f, v: -v)
    torch.testing.assert_close(terms, expected, rtol=1e-6, atol=1e-6)
    # To the first order in the rate it is the gradient of the loss after the step.
    lola = LOLA(rate=1e-4)(game, draw())[0]
    torch.testing.assert_close(lola, slope[0], rtol=1e-6, atol=1e-6)


def test_stable_opponent_shaping_is_between_lookahead_and_lola():
    x, y = point(0.3, -0.5, 0.2), point(0.7, 0.1)
    game = Game(smooth(x, y), [[x], [y]], [0.3, 0.2])
    lola, sos, own = (torch.cat(u(game, draw())) for u in (LOLA(), SOS(), Simultaneous()))
    ahead = own + torch.cat([game.foresight(i, game.rates) for i in range(2)])
    weight = sos_weight(own, ahead, lola - ahead, 0.5, 0.1)
    assert 0 < float(weight) <= 1
    torch.testing.assert_close(sos, ahead + weight * (lola - ahead))
    assert float(sos @ ahead) > 0


def test_a_chain_of_levels_is_the_total_derivative():
    """The middle answers to the leader, and the last to both."""
    x, m, f = point(0.3, -0.5), point(0.7), point(0.1, 0.4)
    game = Game(smooth(x, m, f), [[x], [m], [f]], [0.3, 0.3, 0.3], [[0], [1], [2]])
    assert [game.followers(i) for i in range(3)] == [[[1], [2]], [[2]], []]
    base = [p.detach() for p in (x, m, f)]

    def after(leader):
        step = moved([leader, *base[1:]], 1, 0.3) - moved(base, 1, 0.3)
        middle = base[1] + step
        last = base[2] + moved([leader, middle, base[2]], 2, 0.3) - moved(base, 2, 0.3)
        return smooth(leader, middle, last)[0]

    total = game.gradient(0, 0) + game.shaping(0, lambda _, f, v: -0.3 * v)
    torch.testing.assert_close(total, numerical(after, base[0]), rtol=1e-6, atol=1e-6)


def test_a_leaders_update_is_the_slope_along_the_followers_best_answers():
    generator = draw()
    hessian = torch.randn(4, 4, generator=generator).double()
    hessian = hessian @ hessian.T
    push, aim = torch.randn(2, 4, 3, generator=generator).double()
    damped = hessian + 0.1 * torch.eye(4).double()

    def answer(leader):
        return -torch.linalg.solve(damped, push @ leader)

    def loss(leader, follower):
        return (follower @ aim @ leader) + (leader**2).sum() + torch.sin(follower).sum()

    x = point(0.5, -1.0, 0.25)
    y = answer(x.detach()).requires_grad_()
    losses = [loss(x, y), y @ hessian @ y / 2 + y @ push @ x]
    game = Game(losses, [[x], [y]], [0.1, 0.1], [[0], [1]])
    total, own = SPG(rank=4, rho=0.1)(game, draw())
    expected = numerical(lambda v: loss(v, answer(v)), x.detach())
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(own, hessian @ y.detach() + push @ x.detach())


def test_nystroms_inverse_is_the_dense_one_where_the_rank_suffices():
    generator = draw()
    half = torch.randn(12, 3, generator=generator).double()
    vector = torch.randn(12, generator=generator).double()
    indefinite = half[:, :1] @ half[:, :1].T - half[:, 1:] @ half[:, 1:].T
    enough = (half @ half.T, torch.tensor([1, 4, 7]))
    more = (half @ half.T, torch.tensor([0, 2, 4, 6, 8]))
    for matrix, columns in (enough, more, (indefinite, torch.arange(12))):
        found = nystrom_solve(partial(torch.mv, matrix), vector, columns, 0.1)
        dense = torch.linalg.solve(matrix + 0.1 * torch.eye(12).double(), vector)
        torch.testing.assert_close(found, dense, rtol=1e-6, atol=1e-8)
    nothing = nystrom_solve(torch.zeros_like, vector, torch.arange(5), 0.1)
    torch.testing.assert_close(nothing, 10 * vector)
    lost = nystrom_solve(lambda v: v * torch.nan, vector, torch.arange(5), 0.1)
    assert lost.isnan().all()


@pytest.mark.parametrize("update", UPDATES, ids=lambda u: type(u).__name__)
def test_an_update_leaves_everything_as_it_was(update):
    x, y = point(0.3, -0.5, 0.2), point(0.7, 0.1)
    before = torch.cat([x, y]).detach().clone()
    game = Game(smooth(x, y), [[x], [y]], [0.1, 0.2], [[1], [0]])
    first, again = update(game, draw()), update(game, draw())
    fresh = update(Game(smooth(x, y), [[x], [y]], [0.1, 0.2], [[1], [0]]), draw())
    for found in (again, fresh):  # not to the bit: a product's bits may depend on where it lies
        torch.testing.assert_close(found, first, rtol=1e-9, atol=1e-12)
    assert torch.equal(torch.cat([x, y]), before)
    assert x.grad is None
    assert y.grad is None
    assert not any(v.requires_grad for v in first)


def test_parameters_may_come_in_any_shapes():
    x, y = point(0.3, -0.5, 0.2, 0.9), point(0.7, 0.1)
    whole = SOS()(Game(smooth(x, y), [[x], [y]], [0.1, 0.2]), draw())
    a, b = (x.detach()[:1].requires_grad_(), x.detach()[1:].reshape(3, 1).requires_grad_())
    losses = smooth(flat([a, b]), y)
    per_parameter = [torch.full((4,), 0.1).double(), 0.2]
    apart = SOS()(Game(losses, [[a, b], [y]], per_parameter), draw())
    torch.testing.assert_close(apart, whole)


def test_without_followers_it_is_ones_own_gradient():
    x = point(0.3, -0.5)
    for update in UPDATES:
        game = Game(smooth(x), [[x]], [0.1], [[0]])
        torch.testing.assert_close(update(game, draw())[0], game.gradient(0, 0).detach())


# ---------------------------------------------------------------- steps that were played

PAYS = torch.tensor([[[1.0, -2.0], [0.5, 3.0]], [[-1.0, 2.0], [1.5, 0.0]]]).double()
"""The payoffs of two players, by what the first and the second do."""


def policies(logits):
    """Log probabilities (5, 2) of both actions, at the begin and after each pair of actions."""
    return logits.reshape(5, 2).log_softmax(1)


def expected_losses(first, second):
    """Return minus the exact mean payoff per step of two rounds, each of which sees the last."""
    p, q = policies(first).exp(), policies(second).exp()
    at = (p[0].unsqueeze(1) * q[0]).flatten()  # of the four pairs
    pays = PAYS.reshape(2, 4)
    after = (p[1:].unsqueeze(2) * q[1:].unsqueeze(1)).reshape(4, 4)
    total = pays @ at + pays @ (at @ after)
    return [-total[0] / 2, -total[1] / 2]


def play(first, second, count, seed):
    """Return states, both players' actions, and rewards to go; the first three (count, 2)."""
    generator = torch.Generator().manual_seed(seed)
    tables = [policies(v.detach()).exp() for v in (first, second)]
    state, states, actions = torch.zeros(count, dtype=torch.long), [], []
    for _ in range(2):
        both = [torch.multinomial(t[state], 1, generator=generator).squeeze(1) for t in tables]
        states.append(state)
        actions.append(torch.stack(both))
        state = 1 + 2 * both[0] + both[1]
    actions = torch.stack(actions, 2)
    rewards = PAYS[:, actions[0], actions[1]]
    return torch.stack(states, 1), actions, rewards.flip(2).cumsum(2).flip(2)


def sampled_losses(players, played, update):
    states, actions, to_go = played
    tables = [policies(v) for v in players]
    logprobs = sum(t[states, a] for t, a in zip(tables, actions, strict=True))
    begins = torch.zeros_like(states, dtype=torch.bool)
    begins[:, 0] = True
    before = said_before(logprobs, begins)
    losses = []
    for advantages in to_go:
        tokens = {"advantages": advantages.flatten(), "old_logprobs": logprobs.detach().flatten()}
        step, _ = update.step_loss(logprobs.flatten(), tokens)
        losses.append(game_loss(step.reshape(logprobs.shape), before))
    return losses


def table(seed):
    drawn = torch.randn(10, generator=torch.Generator().manual_seed(seed)).double()
    return drawn.requires_grad_()


def games(count, batches, update):
    """Yield the exact game, and sampled ones."""
    players = [table(1), table(2)]
    lists, rates = [[p] for p in players], [1.0, 1.0]
    exact = Game(expected_losses(*players), lists, rates)
    for seed in range(batches):
        losses = sampled_losses(players, play(*players, count, seed), update)
        yield exact, Game(losses, lists, rates)


def require_unbiased(pairs):
    """Require that the mean of estimates is the exact value, within their standard errors."""
    exact, estimates = pairs[0][0], torch.stack([estimate for _, estimate in pairs])
    error = estimates.std(0) / len(estimates) ** 0.5
    seen = error > 0
    assert seen.sum() >= 8
    z = (estimates.mean(0) - exact)[seen] / error[seen]
    assert float(z.square().mean().sqrt()) < 1.6
    assert float(z.abs().max()) < 4
    # It can tell: most are many standard errors from 0, so twice of it would be seen.
    assert float((exact[seen] / error[seen]).abs().max()) > 8


@pytest.mark.parametrize("update", [LOLA(), POLA()], ids=lambda u: type(u).__name__)
def test_derivatives_of_sampled_losses_are_unbiased(update):
    vector = torch.linspace(-1, 1, 10).double()
    for of, first, then in ((0, 0, 1), (1, 0, 1), (0, 1, 0)):
        pairs = [
            (e.mixed(of, first, then, vector), s.mixed(of, first, then, vector))
            for e, s in games(300, 60, update)
        ]
        require_unbiased(pairs)
    for by in (0, 1):
        pairs = [
            (e.gradient(0, by).detach(), s.gradient(0, by).detach())
            for e, s in games(300, 60, update)
        ]
        require_unbiased(pairs)


def test_a_sampled_update_comes_to_the_exact_one():
    for update in (LOLA(), SOS(), SPG()):
        [(exact, sampled)] = games(200_000, 1, update)
        for expected, found in zip(update(exact, draw()), update(sampled, draw()), strict=True):
            assert float(torch.cosine_similarity(expected, found, 0)) > 0.999
            torch.testing.assert_close(found, expected, rtol=0.1, atol=0.02)


def test_mixed_derivatives_are_of_scores_and_gradients_of_steps():
    """-A_t (S_f,t S_g,<=t + S_f,<t S_g,t), with scores made one by one."""
    players = [table(3), table(4)]
    played = play(*players, 20, 0)
    states, actions, to_go = played
    scores = []
    for player, taken in zip(players, actions, strict=True):
        chosen = policies(player)[states, taken]
        parts = [torch.autograd.grad(v, player, retain_graph=True)[0] for v in chosen.flatten()]
        scores.append(torch.stack(parts).reshape(20, 2, 10))
    vector = torch.linspace(-1, 1, 10).double()
    f, g = scores[1], scores[0]
    f_so_far, g_so_far = f.cumsum(1), g.cumsum(1)
    along = torch.einsum("btx,x->bt", f, vector)
    before = torch.einsum("btx,x->bt", f_so_far - f, vector)
    # <m, nabla_f L_f> C_PG with C_PG = S_g, and <m, S_f> C_S with C_S = nabla_g L_f, step by step
    expected = torch.einsum("bt,btx->x", -to_go[1] * along, g_so_far)
    expected = expected + torch.einsum("bt,btx->x", -to_go[1] * before, g)
    losses = sampled_losses(players, played, LOLA())
    game = Game(losses, [[p] for p in players], [1.0, 1.0])
    torch.testing.assert_close(game.mixed(1, 1, 0, vector), expected / 40)


def test_what_was_said_before_is_of_the_same_episode():
    logprobs = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    begins = torch.tensor([[True, False, True, False], [False, False, False, True]])
    expected = [[0, 1, 0, 3], [0, 5, 11, 0]]
    assert said_before(logprobs, begins).tolist() == expected


def test_a_proximal_update_stops_at_its_bounds():
    logprobs = torch.tensor([0.5, 0.1]).log1p().requires_grad_()  # ratios 1.5 and 1.1
    tokens = {"advantages": torch.ones(2), "old_logprobs": torch.zeros(2)}
    loss, metrics = POLA().step_loss(logprobs, tokens)
    assert loss.tolist() == pytest.approx([-1.2, -1.1])
    assert metrics["clip_frac"].tolist() == [1, 0]
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == pytest.approx([0, -1.1])
    # The plain one takes the policy as it is for the one that collected.
    loss, _ = LOLA().step_loss(logprobs, tokens)
    assert loss.tolist() == [-1, -1]
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [-1, -1]
    assert PSOS(loss=PPOClip(0.4, 0.6)).step_loss(logprobs, tokens)[0].tolist() == pytest.approx(
        [-1.5, -1.1]
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SPG(rank=0), "rank=0 must be >= 1"),
        (lambda: SPG(rho=0), "rho=0 must be > 0"),
        (lambda: LOLA(rate=-1), "rate=-1 must be > 0"),
        (lambda: SOS(a=1), r"SOS\(a=1, b=0.1\): both must be in \(0, 1\)"),
        (lambda: PSOS(loss="x"), "PSOS.loss"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
