"""benchmarks.scaling_simulated: formulas by hand, what must not depend on what, whole results."""

import math
from dataclasses import fields, replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from benchmarks import scaling_lengths
from benchmarks.scaling_simulated import checks, costs, runs, sync, tables
from benchmarks.scaling_simulated.constants import H100, MODELS, Constants, Model, table_of
from benchmarks.scaling_simulated.costs import Lengths, Replica, Trainer
from benchmarks.scaling_simulated.runs import ASYNC, MODES, ONE_STEP, SYNC, Load, layouts, run
from benchmarks.scaling_simulated.sync import TRANSPORTS, Push
from lightning_rl.collect.ahead import AsyncCollector

SMALL = Load(32_768, 12_720.0, 0.9, 0.5, 8, 4)
# 64 + 2 * (2048 + 48) = 4,256 with 4,208 that multiply; a head of 4 numbers, two for keys.
TOY = Model("toy", 8, 2, 2, 1, 16, tied=True, head_size=4, vocabulary=8)


def model_of(model: Model) -> torch.nn.Module:
    common = {
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "tie_word_embeddings": model.tied,
    }
    config = Qwen3Config(intermediate_size=model.width, **common)
    if model.experts:
        config = Qwen3MoeConfig(
            moe_intermediate_size=model.width,
            num_experts=model.experts,
            num_experts_per_tok=model.active_experts,
            **common,
        )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_are_those_of_the_real_models(name):
    model = MODELS[name]
    built = model_of(model)
    assert model.parameters == sum(p.numel() for p in built.parameters())
    assert model.gathers == len(built.state_dict())  # a tied head comes twice


def test_numbers_of_weights_by_hand():
    # Attention 8 * 4 * 2 * (2 + 1), MLP 3 * 8 * 16, norms 2 * 8 + 2 * 4; 64 of the embedding.
    assert TOY.parameters == 2 * (192 + 384 + 24) + 64 + 8
    assert TOY.active == 2 * (192 + 384) + 64
    assert TOY.adapted == 2 * (192 + 384)
    # q 8 + 8, k and v 8 + 4 each, o 8 + 8; three of 8 + 16.
    assert TOY.adapters(rank=3) == 2 * 3 * (16 + 12 + 12 + 16 + 72)
    moe = replace(TOY, experts=4, active_experts=2)
    assert moe.active == 2 * (192 + 2 * 384 + 32) + 64
    assert moe.adapters(rank=3) == 2 * 3 * (16 + 12 + 12 + 16)
    assert moe.tensors - moe.gathers == 2 * (4 * 3 - 2)


# ---------------------------------------------------------------- computing


def test_a_ring_by_hand_and_none_on_one_gpu():
    c = replace(H100, nvlink=100.0, link_share=0.5, launch=3.0, hop=0.25)
    assert costs.ring_seconds(c, 400.0, 4) == 3 + 3 * 0.25 + 300 / 50
    assert costs.ring_seconds(c, 400.0, 1) == 0


def test_a_decoding_step_by_hand():
    c = replace(H100, hbm=100.0, hbm_share=0.5, decode_step=1.0, decode_request=0.1, prompt=6)
    lengths = Lengths.of([4, 4])  # 2 tokens before each, on average
    replica = Replica(c, TOY, 1, lengths)
    assert replica.context == 8
    assert replica.cache_bytes == 8 * 2 * 2 * 1 * 4 * 2  # layers, keys and values, bfloat16
    expected = 1 + 3 * 0.1 + (2 * TOY.active + 3 * 256) / 50
    assert replica.step(3) == pytest.approx(expected)
    # Bound by products where there are few: 2 per weight, 4 per number of the query's heads.
    slow = replace(replica, c=replace(c, flops=100.0, decode_share=0.1))
    products = 3 * (2 * TOY.active + 4 * 2 * 2 * 4 * 8)
    assert slow.step(3) == pytest.approx(1.3 + products / 10)


def test_experts_that_are_read_grow_from_the_active_to_all():
    model = MODELS["30B-A3B"]
    replica = Replica(H100, model, 2, Lengths.of([1000]))
    assert replica.weights_read(1) == pytest.approx(2 * model.active)
    resident = model.parameters - model.vocabulary * model.hidden  # but the embedding
    assert replica.weights_read(1000) == pytest.approx(2 * resident, rel=1e-4)  # but norms
    two = 128 * (1 - (120 / 128) ** 2)
    expected = model.active + model.layers * model.expert * (two - 8)
    assert replica.weights_read(2) == pytest.approx(2 * expected)


def test_an_update_by_hand():
    c = replace(H100, flops=100.0, mfu=0.5, hbm=1e6, hbm_share=1.0, state_bytes=16)
    trainer = Trainer(c, TOY, 1, Lengths.of([6]))
    per_token = 6 * TOY.active + 12 * 2 * 2 * 4 * 3
    assert trainer.flops_per_token == per_token
    stepping = 32 * TOY.parameters / 1e6
    assert trainer.train(10, groups=4) == pytest.approx(10 * per_token / 50 + stepping)
    assert trainer.train(10, 4, imbalance=2) == pytest.approx(20 * per_token / 50 + stepping)
    assert trainer.score(10, 4) == pytest.approx(10 * per_token / 150)


def test_one_gpu_does_not_communicate_and_many_wait_for_the_network():
    model, lengths = MODELS["8B"], Lengths.of([1000])
    alone = Trainer(H100, model, 1, lengths)
    assert alone.gather() == alone.exchange(1e6, 1) == 0
    assert Push(H100, model, 1, 1, 1).gather == 0
    slow = replace(H100, network=1e6)
    trainer = Trainer(slow, model, 16, lengths)
    # A rank sends 15/16 of 2 bytes per weight, and as much again, and 4 of the gradients.
    sent = 15 / 16 * 8 * model.parameters / (slow.link_share * 8e6)
    assert trainer.train(16_000, 16) == pytest.approx(sent, rel=1e-3)


def test_ranks_share_packs_once_there_are_more_of_them_than_groups():
    trainer = Trainer(H100, MODELS["8B"], 64, Lengths.of([1000]))
    assert [trainer.sharing(groups) for groups in (128, 64, 16)] == [1, 1, 4]
    # Of 64,000 tokens a rank has 1,000; 2 * 128 * (32 + 8) numbers each, 3/4 of them leave it.
    sent = 36 * (1000 * 2 * 128 * 40 * 2 * 3 / 4 / H100.link(4) + 4 * H100.launch)
    assert trainer.exchange(64_000, 4) == pytest.approx(sent)


# ---------------------------------------------------------------- syncs

PLAIN = replace(
    H100, push=0, call=0, launch=0, hop=0, load_tensor=0, stage_tensor=0, hbm=math.inf,
    pcie=math.inf, pageable=math.inf, nvlink=math.inf,
)  # fmt: skip
"""Nothing takes time but the network and the disk."""


def test_a_broadcast_sends_each_replica_all_from_one_card():
    model = MODELS["8B"]
    size = 2 * model.parameters
    for replicas in (1, 2, 8):
        push = Push(PLAIN, model, 4, replicas, 2)
        expected = replicas * size / (0.8 * PLAIN.network)
        assert sync.broadcast(push) == pytest.approx(expected)
        assert sync.shared_broadcast(push) == pytest.approx(size / (0.8 * PLAIN.network))
    share = replace(PLAIN, trained_share=0.25)
    changed = sync.changed_only(Push(share, model, 4, 8, 2))
    assert changed == pytest.approx(sync.broadcast(Push(PLAIN, model, 4, 2, 2)))


@pytest.mark.parametrize("name", ["collective", "shared collective", "collective, changed_only"])
def test_twice_the_bandwidth_halves_the_transfer(name):
    slow, fast = (
        TRANSPORTS[name](Push(replace(PLAIN, network=rate), MODELS["8B"], 4, 3, 1))
        for rate in (1e9, 2e9)
    )
    assert slow / fast == pytest.approx(2)


def test_a_gather_is_of_float32_and_tensor_by_tensor():
    c = replace(H100, nvlink=100.0, link_share=1.0, hop=0.0, launch=2.0)
    push = Push(c, TOY, 4, 1, 1)
    # 3/4 of 4 bytes per weight arrive; 11 tensors a layer and 3.
    assert push.gather == pytest.approx(3 * TOY.parameters / 100 + 2 * (2 * 11 + 3))


def test_buckets_are_staged_while_others_are_sent():
    c = replace(H100, push=7.0)
    assert sync.staged(c, 1, stage=4.0, deliver=6.0) == 7 + 10
    assert sync.staged(c, 2, stage=4.0, deliver=6.0) == 7 + 2 + 3 + 3
    assert sync.staged(c, 10**9, stage=4.0, deliver=6.0) == pytest.approx(7 + 6)


def test_a_file_is_written_once_and_read_by_each_node():
    c = replace(PLAIN, disk_write=1e9, disk_read=2e9, disk_total=8e9)
    size = 2 * MODELS["8B"].parameters / 1e9
    seconds = [sync.checkpoint(Push(c, MODELS["8B"], 4, n, 8)) for n in (1, 4, 16)]
    assert seconds == pytest.approx([size * (1 + 1 / 2), size * (1 + 1 / 2), size * (1 + 16 / 8)])


def test_adapters_alone_are_less_than_what_they_adapt():
    for model in MODELS.values():
        push = Push(H100, model, 16, 4, 8)
        apart = TRANSPORTS["adapters beside their base"](push)
        assert apart < TRANSPORTS["collective, adapters_only"](push)
        assert apart < TRANSPORTS["collective"](push)


# ---------------------------------------------------------------- lengths


def test_a_load_has_the_mean_that_it_is_given():
    load = replace(SMALL, group_size=16)
    assert load.lengths.mean == pytest.approx(12_720, rel=0.05)
    assert max(length for group in load.sample for length in group) == load.limit
    # Without a limit: median * exp(deviation ** 2 / 2).
    assert runs.cut_mean(100, 0.5, 1e9) == pytest.approx(100 * math.exp(0.125))
    short = replace(load, limit=8192, mean=12_720 / 4)
    assert short.median == pytest.approx(load.median / 4)


def test_groups_of_equal_length_are_dealt_out_evenly():
    equal = replace(SMALL, deviation=1e-9, mean=1000.0)
    assert equal.imbalance(4) == pytest.approx(1)
    assert SMALL.imbalance(1) == pytest.approx(1)
    assert 1 < SMALL.imbalance(2) < SMALL.imbalance(8) < 8


def test_a_lognormal_is_found_although_it_is_cut_off():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.exp(5 + 0.8 * torch.randn(20_000, generator=generator, dtype=torch.float64))
    for limit in (1e9, 300.0):
        mean, deviation = scaling_lengths.fit(drawn.clamp(max=limit).tolist(), limit)
        assert mean == pytest.approx(5, abs=0.03)
        assert deviation == pytest.approx(0.8, abs=0.03)


def test_what_prompts_explain_by_hand():
    e = math.e
    # Means 1 and 3 of two each; between 2 * (1 + 1) = 4, within (0 + 0 + 1 + 1) / 2 = 1.
    assert scaling_lengths.same_prompt([[e, e], [e**2, e**4]]) == pytest.approx((4 - 1) / (4 + 1))
    assert scaling_lengths.same_prompt([[2, 8], [2, 8]]) == 0
    assert scaling_lengths.same_prompt([[2, 2], [8, 8]]) == 1


# ---------------------------------------------------------------- runs


def test_parts_add_up_and_nothing_is_negative():
    for mode in MODES:
        row = run(H100, MODELS["8B"], SMALL, 16, mode)
        parts = [getattr(row, part) for part in runs.PARTS]
        assert sum(parts) == pytest.approx(row.iteration)
        assert min(parts) >= 0
        assert row.trainer_waits > -1e-9 * row.iteration
        assert row.trainer_gpus + row.engine_gpus == (32 if mode is SYNC else 16)


def test_more_staleness_never_waits_more():
    def waits(bound):
        mode = replace(ASYNC, make=lambda: AsyncCollector(bound), rereads=False)
        return run(H100, MODELS["8B"], SMALL, 16, mode).trainer_waits

    found = [waits(bound) for bound in (0, 1, 2, 4)]
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.8 * found[0]


def test_a_model_appears_where_it_fits():
    def fits(name, mode):
        found = [layouts(H100, MODELS[name], SMALL, gpus, mode) for gpus in (8, 64, 128)]
        return [len(possible) > 0 for possible in found]

    # 3.8 TB of weights, gradients and Adam's moments, in 60 GB of each GPU.
    assert Trainer(H100, MODELS["235B-A22B"], 1, SMALL.lengths).needed == 63
    assert fits("235B-A22B", SYNC) == [False, True, True]
    assert fits("235B-A22B", ONE_STEP) == [False, False, True]
    assert fits("0.6B", ONE_STEP) == [True, True, True]
    assert run(H100, MODELS["235B-A22B"], SMALL, 8, SYNC) is None


def test_the_result_is_whole(monkeypatch):
    monkeypatch.setattr(runs, "measured_spread", lambda: (0.9, 0.5))
    c = replace(H100, groups=8, group_size=4)
    rows = list(tables.runs(c, counts=(64,)))
    found = [*checks.syncs()]
    told = tables.summary(c, rows, found)
    assert {row["model"] for row in told["runs"]} == set(MODELS)
    assert {(row["model"], row["limit"]) for row in told["runs"]} >= {("8B", 8192), ("8B", 32_768)}
    for row in told["runs"]:
        assert set(runs.PARTS) < set(row)
        assert 0 <= row["waiting_share"] < 1
        assert row["efficiency"] > 0
    for by_model in told["syncs"].values():
        assert set(by_model) == {"8B", "32B", "235B-A22B"}
        assert all(set(found) == set(TRANSPORTS) for found in by_model.values())
    for check in told["checks"]:
        assert check["ratio"] == check["ours"] / check["theirs"]
        assert check["reproduced"] == (0.8 <= check["ratio"] <= 1.25)
    assert told["reproduced"] == sum(check["reproduced"] for check in told["checks"])
    assert set(told["constants"]) == {field.name for field in fields(Constants)}


def test_efficiency_is_over_the_synchronous_run_on_the_fewest_gpus():
    first = run(H100, MODELS["8B"], SMALL, 8, SYNC)
    rows = [
        replace(first, gpus=gpus, mode=mode, tokens_per_s_gpu=speed)
        for gpus, mode, speed in ((16, "sync, colocated", 300.0), (8, "sync, colocated", 400.0),
                                  (8, "one step off", 200.0), (16, "one step off", 500.0))
    ]  # fmt: skip
    assert [tables.efficiency(row, rows) for row in rows] == [0.75, 1.0, 0.5, 1.25]
    lines = tables.iteration_table(rows[3:], rows)
    assert len(lines) == 3
    assert lines[-1].endswith("| 500 | 125% |")


def test_every_constant_says_its_unit_and_source():
    for name, told in table_of(H100).items():
        assert told["unit"], name
        assert len(told["source"]) > 5, name


def test_results_that_are_kept_are_compared():
    found = {check.what: check for check in checks.measured()}
    assert len(found) == 7
    half = found["train on two processes, 27 M: half of one's"]
    assert half.ours == pytest.approx(14.1 / 2)
