"""Routed experts as text: what goes in comes out, in parts and together, in rollouts and files."""

import pytest
import torch

from lightning_rl.agents.rows import captured, keep
from lightning_rl.data.batch import empty_like
from lightning_rl.data.packing import pack_rollouts
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.data.routing import beginning, extended, of_text, to_text
from lightning_rl.errors import DataError
from lightning_rl.rollout import Call, Rollout


def experts(tokens: int, most: int = 8, seed: int = 0) -> torch.Tensor:
    """Return experts (T, 2, 3) of small numbers, or numbers that take two bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(most, (tokens, 2, 3), generator=generator, dtype=torch.int16)


@pytest.mark.parametrize("most", [8, 256, 300])
def test_text_holds_all(most):
    chosen = experts(50, most)
    assert torch.equal(of_text(to_text(chosen)), chosen)
    width = 2 if most > 256 else 1
    assert len(to_text(chosen)) == len("2x3x1:") + 4 * -(-50 * 2 * 3 * width // 3)


def test_a_beginning_is_of_the_first_tokens():
    chosen = experts(7)
    for tokens in (0, 1, 4, 7, 9):
        assert torch.equal(of_text(beginning(to_text(chosen), tokens)), chosen[:tokens])
    assert beginning("", 3) == ""


def test_what_is_recorded_stands_and_what_is_new_follows():
    first, again = experts(4), experts(7, seed=1)
    both = of_text(extended(to_text(first), to_text(again)))
    assert torch.equal(both, torch.cat([first, again[4:]]))
    assert extended("", to_text(again)) == to_text(again)
    assert extended(to_text(first), "") == to_text(first)
    wide = experts(7, 300, seed=1)
    assert torch.equal(of_text(extended(to_text(first), to_text(wide)))[4:], wide[4:])
    with pytest.raises(DataError, match="two models"):
        extended(to_text(first), to_text(again[:, :1]))


@pytest.mark.parametrize("text", ["2x3x1:%%%%", "2x3x1:AAAA", "nonsense", "2x3x7:AAAA", "0x3x1:"])
def test_damaged_text_is_refused(text):
    with pytest.raises(DataError, match="damaged"):
        of_text(text)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".sqlite"])
def test_files_keep_them_and_know_rollouts_without(tmp_path, make_rollout, ending):
    text = to_text(experts(4))
    rollouts = [make_rollout([3, 4], [5, 6, 7], routed_experts=text), make_rollout([3], [4])]
    file = open_rollouts(tmp_path / f"rollouts{ending}")
    file.append(rollouts, 1)
    read = [recorded.rollout for recorded in file.read()]
    assert [rollout.rows[0].routed_experts for rollout in read] == [text, ""]
    record = rollouts[0].to_dict()
    assert Rollout.from_dict(record).rows[0].routed_experts == text
    for row in record["rows"]:
        del row["routed_experts"]  # as it was written before
    assert Rollout.from_dict(record).rows[0].routed_experts == ""


def test_a_batch_has_a_column_of_them(make_rollout):
    chosen = experts(4)
    known = make_rollout([3, 4], [5, 6, 7], routed_experts=to_text(chosen))
    batch = pack_rollouts([known, make_rollout([3], [4, 5])])
    column = batch["tokens", "routed_experts"]
    assert torch.equal(column[:4], chosen)
    assert (column[4:] == -1).all()  # the last token is in no pass, the other rollout unknown
    assert (empty_like(batch)["tokens", "routed_experts"][:4] == chosen).all()
    assert "routed_experts" not in pack_rollouts([make_rollout([3], [4])])["tokens"]


def test_prompts_are_one_only_where_they_were_read_alike(make_rollout):
    other = experts(4)
    other[1] = (other[1] + 1) % 8  # of the prompt's second token
    later = experts(4)
    later[3] = (later[3] + 1) % 8  # of the completion
    texts = [to_text(chosen) for chosen in (experts(4), other, later)]
    rollouts = [make_rollout([3, 4], [5, 6, 7], routed_experts=text) for text in texts]
    assert pack_rollouts(rollouts)["rollouts", "prefix"].tolist() == [0, 1, 0]


def test_calls_that_are_cut_anew_keep_theirs(make_rollout):
    """Two calls on one row; without the second, what it read of its own is not the first's."""
    chosen = experts(6)
    rollout = make_rollout([3, 4], [5, 6, 7, 8], routed_experts=to_text(chosen))
    rollout.rows[0].loss_mask[2] = False  # given between the calls
    rollout.calls = [Call(0, 0, 2, seed=1), Call(0, 3, 4, seed=2)]
    first = captured(rollout, rollout.calls[0]).completion
    assert torch.equal(of_text(first.routed_experts), chosen[:4])
    keep(rollout, rollout.calls[:1])
    assert torch.equal(of_text(rollout.rows[0].routed_experts), chosen[:4])
