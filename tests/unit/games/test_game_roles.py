"""Policies as players: derivatives without double backward are those with it; a step and a run."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoTokenizer, GPTNeoXConfig

from lightning_rl import GSPO, EntropyBonus, LoRA, Surrogate
from lightning_rl.algos.advantages import GAE
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.extend import Periodic, pack_rollouts
from lightning_rl.games import (
    LOLA,
    POLA,
    PSOS,
    PSPG,
    SOS,
    SPG,
    CrossFitted,
    GameRolesModule,
    GameUpdate,
    RolesModule,
    Simultaneous,
)
from lightning_rl.games.algos.game import Game, flat
from lightning_rl.games.roles.conversations import conversation_losses, written
from lightning_rl.models.heads import SharedValueHead
from lightning_rl.rollout import Call, Row
from tests.support.doubles import doubled
from tests.support.small_run import adamw, trainer_of
from tests.support.tiny_models import save_random_model
from tests.support.two_roles import group, roles_data

ROLES = ("first", "second")
UPDATES = [SPG(), PSPG(), LOLA(rate=0.3), POLA(rate=0.3), SOS(rate=0.3), PSOS(rate=0.3)]
ORDER = [["first"], ["second"]]


@pytest.fixture(scope="module")
def conversations(make_rollout):
    """Make rollouts of the first, the second, and the first again; each is paid apart."""

    def make(seed: int = 0, groups: int = 2, group_size: int = 2):
        generator = torch.Generator().manual_seed(seed)

        def tokens(count):
            return torch.randint(2, 13, (count,), generator=generator).tolist()

        rollouts = []
        for place in range(groups):
            for sample in range(group_size):
                asked, said, answered, again = (tokens(n) for n in (3, 2 + sample, 3, 2))
                rollout = make_rollout(
                    asked,
                    [*said, 2, *again],
                    group_id=str(place),
                    sample_index=sample,
                    loss_mask=[True] * len(said) + [False] + [True] * 2,
                    logprobs=[-1.0] * len(said) + [0.0] + [-1.0] * 2,
                    temperature=0.7,
                )
                rollout.rows[0].role = "first"
                reply = [True] * 3, [-1.0] * 3, [0] * 3
                rollout.rows += [Row([*asked, *said], answered, *reply, role="second")]
                end = len(said)
                rollout.calls = [Call(0, 0, end), Call(1, 0, 3), Call(0, end + 1, end + 3)]
                paid = torch.rand(2, generator=generator).tolist()
                rollout.role_rewards = dict(zip(ROLES, paid, strict=True))
                rollouts.append(rollout)
        return rollouts

    return make


def module_of(tiny_model, update=None, first=None, second=None, kind=GameRolesModule, **options):
    own = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "max_grad_norm": None}
    policies = {"first": group(**(own | (first or {}))), "second": group(**(own | (second or {})))}
    if kind is GameRolesModule:
        options = {"update": update or LOLA(rate=0.3), "order": ORDER, "seed": 7} | options
    torch.manual_seed(0)
    return kind(str(tiny_model), policies, **options)


def batch_of(rollouts, roles=ROLES):
    return pack_rollouts(rollouts, roles=roles)


def made(tiny_model, double=True, **options):
    """Return a module whose adapters are anything but zero."""
    module = module_of(tiny_model, **options)
    module.configure_model()
    torch.manual_seed(1)
    for policy in module.loaded_policies.values():
        for name, weight in policy.named_parameters():
            if ".lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        if double:
            policy.double()
    return module


@contextmanager
def plain_attention(lm):
    """Attend with the one kernel that can be differentiated twice."""
    ours = lm.config._attn_implementation
    lm.set_attn_implementation("sdpa")
    with sdpa_kernel(SDPBackend.MATH):
        yield
    lm.set_attn_implementation(ours)


@pytest.fixture(scope="module")
def double_model(tiny_model, tmp_path_factory):
    """Make a model of which no part insists on float32, as others' norms do."""
    path = tmp_path_factory.mktemp("neox")
    save_random_model(
        path, AutoTokenizer.from_pretrained(tiny_model), GPTNeoXConfig, vocab_size=16,
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.2,
    )  # fmt: skip
    return path


def plain_logprobs(player):
    """Log probabilities (M,) of a player's tokens, row by row, by transformers alone."""
    lm, batch = player.group.loaded_policy.lm, player.minibatch
    rollouts, found = batch["rollouts"], []
    lengths = rollouts["length"].tolist()
    ids_R, mask_R = (batch["tokens", n].split(lengths) for n in ("input_ids", "loss_mask"))
    with plain_attention(lm):
        for ids, mask, temperature in zip(ids_R, mask_R, rollouts["temperature"], strict=True):
            log_p = (lm(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
            found.append(log_p.gather(1, ids[1:, None]).squeeze(1)[mask[1:]])
    return torch.cat(found)


class Compared(GameUpdate):
    """An update, and the same of the game whose losses are differentiated twice."""

    def __init__(self, update):
        self.update, self.needs_order, self.factors = update, update.needs_order, update.factors
        self.step_loss, self.pairs = update.step_loss, []

    def __call__(self, game, draw):
        assert len(game.parts) == 2
        written_by = [[len(player.logprobs()) for player in part.players] for part in game.parts]
        parts = [twice_differentiable(part, self.update) for part in game.parts]
        # Every token counts the same, in a part and in the whole.
        own = [
            sum(n * part.gradient(i, i).detach() for n, part in zip(counts, parts, strict=True))
            / sum(counts)
            for i, counts in enumerate(zip(*written_by, strict=True))
        ]
        state = draw.get_state()
        expected = self.update(CrossFitted(parts, game.shares, own), draw)
        draw.set_state(state)
        parameters = [player.parameters for player in game.players]
        before = [flat(p).detach().clone() for p in parameters]
        found = self.update(game, draw)
        self.pairs.append((found, expected, [game.gradient(i, i) for i in range(2)]))
        assert all(torch.equal(flat(p), b) for p, b in zip(parameters, before, strict=True))
        return found


def twice_differentiable(game, update):
    """Return the same game, of losses that know the weights."""
    logprobs = [plain_logprobs(player) for player in game.players]
    said = [
        written(player.minibatch, logprobs_M.detach())
        for player, logprobs_M in zip(game.players, logprobs, strict=True)
    ]
    losses = conversation_losses(update, said, logprobs)
    return Game(losses, [player.parameters for player in game.players], game.rates, game.order)


@pytest.mark.parametrize(
    ("update", "lora"),
    [*((update, LoRA(rank=4)) for update in UPDATES), (LOLA(rate=0.3), None)],
    ids=[*(type(update).__name__ for update in UPDATES), "whole models"],
)
def test_directions_are_those_of_losses_differentiated_twice(
    update, lora, double_model, train_on, conversations
):
    compared = Compared(update)
    proximal = {"ppo_epochs": 2} if "loss" in vars(update) else {}
    own = {"lora": lora} | proximal
    module = made(double_model, update=compared, first=own, second=own)
    train_on(module, [doubled(batch_of(conversations()))])
    assert len(compared.pairs) == (2 if proximal else 1)
    for found, expected, own in compared.pairs:
        for a, b in zip(found, expected, strict=True):
            assert float((a - b).norm()) < 1e-6 * float(b.norm())
        # What the update adds is not lost in that.
        assert float((found[0] - own[0]).norm()) > 1e-3 * float(own[0].norm())


ALONE = [["first", "second"]]  # nobody leads anybody


@pytest.mark.parametrize(
    ("update", "steps", "loss"),
    [
        (Simultaneous(), {}, {"loss": Surrogate()}),
        (PSPG(), {"ppo_epochs": 2, "minibatches": 2}, {}),
    ],
    ids=["one step", "four steps"],
)
def test_policies_that_do_not_look_at_each_other_learn_as_in_roles_module(
    update, steps, loss, tiny_model, train_on, conversations
):
    own = {"entropy": EntropyBonus(0.1), "optimizer": adamw(1e-2), "max_grad_norm": 1.0} | steps
    ours = made(tiny_model, False, update=update, order=ALONE, first=own, second=own)
    plain = made(tiny_model, False, first=own | loss, second=own | loss, kind=RolesModule)
    for module in (ours, plain):
        train_on(module, [batch_of(conversations(seed)) for seed in range(2)])
        assert module.role_versions == {"first": 2, "second": 2}
    for name, weight in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name


class Noted(Compared):
    """An update whose directions are kept."""

    def __call__(self, game, draw):
        self.pairs.append(self.update(game, draw))
        return self.pairs[-1]


class Games(Noted):
    """An update whose games are kept."""

    def __call__(self, game, draw):
        self.pairs.append(game)
        return self.update(game, draw)


def groups_in(player):
    return set(player.minibatch["rollouts", "group"].tolist())


def test_a_group_is_in_one_part_of_the_estimates(tiny_model, train_on, conversations):
    update = Games(LOLA(rate=0.3))
    module = made(
        tiny_model, False, update=update, first={"minibatches": 2}, second={"minibatches": 2}
    )
    train_on(module, [batch_of(conversations(groups=5))])
    seen = []
    for game in update.pairs:
        first, second = ([groups_in(player) for player in part.players] for part in game.parts)
        assert first[0] == first[1]
        assert second[0] == second[1]
        assert not first[0] & second[0]
        seen += [*first[0], *second[0]]
    assert sorted(seen) == list(range(5))


def test_with_fewer_groups_than_parts_policies_have_their_own_gradients(
    tiny_model, train_on, conversations
):
    batch = batch_of(conversations(groups=1, group_size=3))
    ours = made(tiny_model, False, update=LOLA(rate=0.3), order=None)
    blind = made(tiny_model, False, update=Simultaneous(), order=None)
    for module in (ours, blind):
        train_on(module, [batch.clone()])
    for name, weight in blind.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name


def noted(model, train_on, batch, update, double=True, **own):
    update = Noted(update)
    train_on(made(model, double, update=update, first=own, second=own), [batch])
    return torch.cat(update.pairs[0])


@pytest.mark.parametrize("update", [SPG(), LOLA(rate=0.3)], ids=["SPG", "LOLA"])
def test_directions_do_not_depend_on_micro_batches_or_the_order_of_rollouts(
    update, double_model, train_on, conversations
):
    rollouts = conversations()
    whole = noted(double_model, train_on, doubled(batch_of(rollouts)), update)
    apart = doubled(batch_of(rollouts[::-1]))
    packed = noted(double_model, train_on, apart, update, max_tokens_per_micro_batch=1)
    assert float((packed - whole).norm()) < 1e-6 * float(whole.norm())


EXPECTED = 10 * torch.finfo(torch.float32).eps ** (2 / 3)
"""The relative error of a derivative in float32 that PolicyPlayer's docstring states."""


class Derivatives(Noted):
    """An update that keeps all players' derivatives along single weights and dense directions."""

    def __call__(self, game, draw):
        for player in game.parts[0].players:
            weights = torch.linspace(-1, 1, len(player.logprobs()), dtype=player.rates.dtype)
            size = len(player.rates)
            single = [player.rates.new_zeros(size) for _ in range(3)]
            for quarter, vector in enumerate(single, 1):
                vector[quarter * size // 4] = 1
            drawn = torch.randn(size, generator=draw, dtype=torch.float64).to(weights.dtype)
            for vector in (*single, player.own(), drawn):
                still = torch.zeros_like(weights)
                self.pairs += [player.along(vector), player.bend(weights, still, vector)]
        return self.update(game, draw)


@pytest.mark.parametrize("lora", [LoRA(rank=4), None], ids=["LoRA", "whole model"])
def test_derivatives_in_single_precision_have_the_stated_error(
    lora, double_model, train_on, conversations
):
    found = []
    for double in (False, True):
        batch = batch_of(conversations())
        update, own = Derivatives(LOLA(rate=0.3)), {"lora": lora}
        module = made(double_model, double, update=update, first=own, second=own)
        train_on(module, [doubled(batch) if double else batch])
        found.append(update.pairs)
    for single, double in zip(*found, strict=True):
        assert single.dtype == torch.float32
        assert float((single - double).norm()) < 10 * EXPECTED * float(double.norm())


@pytest.mark.parametrize("update", [SPG(), LOLA(rate=0.3)], ids=["SPG", "LOLA"])
def test_directions_are_good_in_single_precision(update, double_model, train_on, conversations):
    own, double, single = (
        noted(double_model, train_on, batch, u, double)
        for u, double, batch in (
            (Simultaneous(), True, doubled(batch_of(conversations()))),
            (update, True, doubled(batch_of(conversations()))),
            (update, False, batch_of(conversations())),
        )
    )
    added, error = double - own, single - double
    assert float(error.norm()) < 10 * EXPECTED * float(added.norm())


def test_a_paused_policy_is_no_player(tiny_model, train_on, conversations):
    update, batch = Noted(LOLA(rate=0.3)), batch_of(conversations())
    module = made(tiny_model, False, update=update, first={"schedule": Periodic(2)})
    train_on(module, [batch.clone(), batch.clone()])
    assert [len(directions) for directions in update.pairs] == [2, 1]
    assert module.role_versions == {"first": 1, "second": 2}


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"update": SPG(), "order": None}, r"update=SPG needs an order of first, second"),
        ({"order": [["first"]]}, r"must name each policy once: first, second"),
        ({"update": PSOS(loss=GSPO())}, "update=PSOS reads the column 'row'"),
        ({"first": {"loss": GSPO()}}, "policies.first.loss=GSPO: in a game the update defines"),
        (
            {"second": {"advantage": GAE(), "critic": SharedValueHead()}},
            "policies.second.advantage=GAE .* one advantage per rollout.*; use GRPO",
        ),
        ({"second": {"minibatches": 2}}, "policies.second.update.minibatches=2, but "),
        (
            {"first": {"ppo_epochs": 2, "target_kl": 0.1}},
            "policies.first.update.target_kl=0.1: players take",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(options, words, tiny_model):
    with pytest.raises(ConfigError, match=words):
        module_of(tiny_model, **options)


def test_runs_that_do_not_fit_are_refused_by_name(tiny_model, train_on, conversations, tmp_path):
    rollouts = conversations()
    with pytest.raises(ConfigError, match=r"trainer.precision=bf16-mixed: .* needs float32"):
        train_on(module_of(tiny_model), [batch_of(rollouts)], precision="bf16-mixed")
    few = roles_data(groups_per_iteration=3)
    halved = {"minibatches": 2}
    with pytest.raises(ConfigError, match=r"groups_per_iteration=3 must be >= 4: LOLA multiplies"):
        trainer_of(tmp_path).fit(module_of(tiny_model, first=halved, second=halved), few)
    for rollout in rollouts:
        rollout.calls = []
    with pytest.raises(DataError, match="did not record their calls"):
        train_on(module_of(tiny_model), [batch_of(rollouts)])
