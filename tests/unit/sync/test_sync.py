"""Test when weights are pushed, and how they are cut, compared and written."""

import os
from inspect import isabstract
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_rl.config import names
from lightning_rl.engines import TransformersEngine
from lightning_rl.engines.push import Push
from lightning_rl.errors import (
    ConfigError,
    DamagedWeightsError,
    IncompleteWeightsError,
    WeightSyncError,
)
from lightning_rl.models.policy import Policy
from lightning_rl.sync.adapters import Merger, merge, unit_of
from lightning_rl.sync.checkpoint import CheckpointTransport, read_weights
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.group import BroadcastGroup
from lightning_rl.sync.memory import MemoryTransport, fill, lay_out, unpack
from lightning_rl.sync.native import IPCTransport, NCCLTransport
from lightning_rl.sync.schedule import (
    CollectorSchedule,
    CollectorStatus,
    FixedSchedule,
    SyncState,
    TrainerSchedule,
)
from lightning_rl.sync.stream import WeightPart, parts_of

IDLE = CollectorStatus()  # what a collector that does not prefetch says
BUSY = CollectorStatus(in_flight=3, done=1, wanted=4, may_issue=True, used_up=False)
BATCH_DONE = CollectorStatus(in_flight=3, done=4, wanted=4, may_issue=True, used_up=False)
FULL = CollectorStatus(in_flight=3, done=1, wanted=4, may_issue=False, used_up=False)
TOO_OLD = CollectorStatus(in_flight=0, done=0, wanted=4, may_issue=False, used_up=True)


def pushes(schedule, statuses):
    """Return versions at which it pushes, with one status after each iteration from 1 on."""
    pushed, engine = [], 0
    for trainer, status in enumerate(statuses, 1):
        if schedule.should_sync(SyncState(trainer, engine, status)):
            engine = trainer
            pushed.append(trainer)
    return pushed


def test_a_fixed_schedule_waits_for_its_turn():
    assert pushes(FixedSchedule(every_n_iterations=2), [IDLE] * 6) == [2, 4, 6]
    assert pushes(FixedSchedule(), [BUSY, IDLE, BATCH_DONE]) == [1, 2, 3]


def test_the_trainers_schedule_waits_for_a_good_moment():
    # 1: too early; 2: it works at a batch; 3: that is done. 4: too early; 5: it must not go on.
    statuses = [BATCH_DONE, BUSY, BATCH_DONE, IDLE, TOO_OLD, BUSY, BUSY]
    assert pushes(TrainerSchedule(min_updates=2), statuses) == [3, 5]
    assert pushes(TrainerSchedule(min_updates=2), [IDLE] * 4) == [2, 4]


def test_the_collectors_schedule_waits_until_it_has_used_up_what_it_may():
    statuses = [BUSY, FULL, TOO_OLD, BATCH_DONE, FULL, IDLE]
    assert pushes(CollectorSchedule(), statuses) == [3, 6]
    assert not CollectorSchedule().should_sync(SyncState(4, 4, IDLE))  # nothing new to push


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedSchedule(every_n_iterations=0), "every_n_iterations=0 must be >= 1"),
        (lambda: TrainerSchedule(min_updates=0), "min_updates=0 must be >= 1"),
        (lambda: MemoryTransport(bucket_mb=0), "bucket_mb=0 must be"),
        (lambda: MemoryTransport(adapters_only=True, keep_copy=False), "set keep_copy: true"),
        (lambda: CollectiveTransport(timeout_s=0), "timeout_s=0 must be"),
        (lambda: CollectiveTransport(backend="mpi"), r"backend='mpi' must be one of .*gloo"),
        (lambda: CheckpointTransport("x", keep=0), "keep=0 must be >= 1"),
    ],
)
def test_impossible_settings_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_impossible_pair_is_refused_with_what_to_choose():
    engine = TransformersEngine(device="cpu")
    with pytest.raises(
        ConfigError,
        match=r"CollectiveTransport cannot reach TransformersEngine.*use MemoryTransport",
    ):
        CollectiveTransport().connect(engine)


def test_a_transport_needs_an_engine():
    with pytest.raises(WeightSyncError, match="is not connected"):
        MemoryTransport().push([], 0)


class Takes(TransformersEngine):
    """Keeps what a push gives it."""

    def load_weights(self, weights, version):
        self.taken, self.version = list(weights), version


def test_an_engine_in_this_process_is_given_the_trainers_own_tensors(tmp_path):
    """A transport that stages gives what it has staged, cast to the engine's dtype."""
    weights = [("a.weight", torch.ones(2)), ("b.weight", torch.zeros(3))]
    engine = Takes(dtype="bfloat16", device="cpu")
    direct, staged = MemoryTransport(), CheckpointTransport(str(tmp_path))
    for transport in (direct, staged):
        transport.connect(engine)
    direct.push(iter(weights), 3)
    assert engine.version == 3
    assert all(ours is theirs for ours, theirs in zip(weights, engine.taken, strict=True))
    staged.push(iter(weights), 4)
    assert engine.version == 4
    for (name, weight), (taken_name, taken) in zip(weights, engine.taken, strict=True):
        assert taken_name == name
        assert torch.equal(taken, weight.to(torch.bfloat16))
    direct.close()
    with pytest.raises(WeightSyncError, match="is not connected"):
        direct.push(weights, 5)


# -------------------------------------------------------------------- buckets


def test_a_unit_is_what_engines_fuse():
    layer = "model.layers.3"
    assert {unit_of(f"{layer}.self_attn.{x}_proj.weight") for x in "qkv"} == {f"{layer}.self_attn"}
    assert unit_of(f"{layer}.mlp.gate_proj.weight") == unit_of(f"{layer}.mlp.up_proj.weight")
    experts = {unit_of(f"{layer}.mlp.experts.{i}.gate_proj.weight") for i in range(3)}
    assert experts == {f"{layer}.mlp"}
    assert unit_of("lm_head.weight") == ""


def layers(*sizes):
    """Return units 0, 1, ... of two tensors each, of these numbers of elements."""
    return [
        (f"{unit}.{part}.weight", torch.full((size,), float(10 * unit + part)))
        for unit, size in enumerate(sizes)
        for part in (0, 1)
    ]


def divided(weights, numel, **settings):
    """Parts of at most ``numel`` elements of 2 bytes."""
    return list(parts_of(weights, torch.bfloat16, 0, 2 * numel / 2**20, **settings))


def test_parts_are_full_but_never_split_a_unit():
    # Each tensor takes a multiple of 64 elements: units of 128, 128, 256 and 128.
    found = divided(layers(64, 10, 100, 1), 256)
    assert [[name[0] for name in part.weights] for part in found] == [
        ["0", "0", "1", "1"],
        ["2", "2"],
        ["3", "3"],
    ]
    assert [(part.kind, part.number) for part in found] == [("weights", i) for i in range(3)]
    assert [len(divided(layers(64, 10, 100, 1), n)) for n in (1, 640)] == [4, 1]


def test_adapters_are_parts_before_their_base():
    """In float32, and so half as many elements fit."""
    adapters = [(f"{i}.q.lora_{x}", torch.ones(64)) for i in range(3) for x in "AB"]
    found = divided([*adapters, *layers(64, 64)], 512)
    assert [(part.kind, part.number, part.dtype) for part in found] == [
        ("adapters", 0, torch.float32),
        ("adapters", 1, torch.float32),
        ("base", 0, torch.bfloat16),
    ]
    assert [len(part.weights) for part in found] == [4, 2, 4]


def test_each_weight_has_its_place_in_a_buffer():
    parts = divided(layers(64, 10, 100, 1), 256)
    buckets = [lay_out(part, keep_copy=True) for part in parts]
    assert [[start for *_, start in bucket["tensors"]] for bucket in buckets] == [
        [0, 64, 128, 192],
        [0, 128],
        [0, 64],
    ]
    assert [bucket["numel"] for bucket in buckets] == [256, 256, 128]
    assert [bucket["slot"] for bucket in buckets] == [0, 1, 2]
    assert [lay_out(part, keep_copy=False)["slot"] for part in parts] == [0, 1, 0]


def test_what_is_kept_stays_where_it_was_staged():
    """One of three buckets has nothing that comes, and another a half."""
    weights = layers(1, 1, 1, 1, 1)
    before, buffers = [], []
    for part in divided(weights, 256):
        before.append((lay_out(part, keep_copy=True), list(part.weights)))
        buffers.append(torch.zeros(before[-1][0]["numel"], dtype=torch.bfloat16))
        fill(buffers[-1], before[-1][0], part)
    coming = [(name, weight + 100) for name, weight in weights if name[0] in "34"]
    half, whole = divided(coming, 256, before=before)
    assert [(part.number, part.before) for part in (half, whole)] == [
        (1, before[1][0]),
        (2, before[2][0]),
    ]
    assert lay_out(half, keep_copy=True) == before[1][0] | {"names": ["3.0.weight", "3.1.weight"]}
    assert lay_out(whole, keep_copy=True) == before[2][0]
    for part in (half, whole):
        bucket = lay_out(part, keep_copy=True)
        fill(buffers[part.number], bucket, part)
        arrived = dict(unpack(buffers[part.number], bucket))
        assert {name: int(weight) for name, weight in arrived.items()} == {
            name: int(weight) for name, weight in part.weights.items()
        }
    # Units 0 and 1; 2 as it was and 3; 4.
    assert [[int(x) for x in buffer[::64]] for buffer in buffers] == [
        [0, 1, 10, 11],
        [20, 21, 130, 131],
        [140, 141],
    ]


def test_weights_are_checked_as_they_pass():
    expected = {"a": torch.Size([2]), "b": torch.Size([3])}
    good = {"a": torch.zeros(2), "b": torch.zeros(3)}
    assert list(Push(good.items()).checked(expected)) == list(good.items())
    kept = Push([("a", good["a"])], kept={"b"})
    assert [name for name, _ in kept.checked(expected)] == ["a"]
    with pytest.raises(IncompleteWeightsError, match=r"lacks 1 .* 'b'"):
        list(Push([("a", good["a"])]).checked(expected))
    with pytest.raises(IncompleteWeightsError, match=r"'c' of shape \(1,\).* none of that name"):
        list(Push([("c", torch.zeros(1))]).checked(expected))
    with pytest.raises(IncompleteWeightsError, match=r"'a' of shape \(5,\), .*\(2,\)"):
        list(Push([("a", torch.zeros(5))]).checked(expected))


# -------------------------------------------------------------------- adapters


def test_an_adapter_is_merged_in_float32():
    b, a = torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0, 20.0]])
    adapters = {"q.lora_A": a, "q.lora_B": b}
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert merge("q.weight", weight, adapters).tolist() == [[11, 22], [23, 44]]
    for name in ("q.bias", "k.weight"):
        assert merge(name, weight, adapters) is weight
    # bfloat16 has 256, then 258: 257.001 is nearer to that. A factor in bfloat16 would be 1, and
    # 257 rounds down.
    weight = torch.tensor([[256.0]], dtype=torch.bfloat16)
    adapters = {"q.lora_A": torch.tensor([[1.0]]), "q.lora_B": torch.tensor([[1.001]])}
    assert merge("q.weight", weight, adapters).tolist() == [[258]]
    assert merge("q.weight", weight, adapters).dtype == torch.bfloat16


def test_adapters_without_their_base_are_refused():
    merger = Merger(torch.device("cpu"))
    merger.begin()
    assert list(merger.take([("q.lora_A", torch.ones(1, 2))], with_base=False)) == []
    with pytest.raises(
        IncompleteWeightsError, match=r"1 layers whose base weights .* the first is 'q'"
    ):
        merger.finish()


# -------------------------------------------------------------------- files


def write(directory, weights, version=3, dtype=torch.float32):
    """Write a version's only file; return its path."""
    part = WeightPart(weights, dtype, version, "weights")
    return Path(CheckpointTransport(str(directory)).stage(part)["path"])


def test_files_are_safetensors(tmp_path):
    weights = {"a": torch.randn(3, 5), "b.c": torch.randn(7), "scalar": torch.tensor(2.0)}
    weights["transposed"], weights["tied"] = torch.randn(4, 2).T, weights["a"]
    for dtype in (torch.float32, torch.bfloat16):
        path = write(tmp_path, weights, dtype=dtype)
        assert path.name == "weights-00000003-0000.safetensors"
        for loaded in (load_file(path), dict(read_weights(str(path), 3))):
            assert loaded.keys() == weights.keys()
            for name, weight in weights.items():
                assert torch.equal(loaded[name], weight.to(dtype))


@pytest.mark.parametrize("lost", [1, 60, 150])
def test_a_file_cut_short_is_refused(tmp_path, lost):
    path = write(tmp_path, {"a": torch.randn(3, 5)})  # 60 bytes of data
    os.truncate(path, path.stat().st_size - lost)
    with pytest.raises(DamagedWeightsError, match=r"weights-.*safetensors cannot be read"):
        list(read_weights(str(path), 3))


def test_a_file_of_another_version_is_refused(tmp_path):
    path = write(tmp_path, {"a": torch.zeros(1)}, version=3)
    with pytest.raises(DamagedWeightsError, match="holds version 3 instead of 4"):
        list(read_weights(str(path), 4))
    with pytest.raises(DamagedWeightsError, match="cannot be read"):
        list(read_weights(str(tmp_path / "missing"), 4))


def test_old_files_are_removed_by_age(tmp_path, tiny_model):
    """The engine is in this process. A run that resumes from version 1 writes older numbers."""
    engine = TransformersEngine(device="cpu")
    engine.start(tiny_model)
    weights = dict(Policy(str(tiny_model)).named_weights())
    transport = CheckpointTransport(str(tmp_path), keep=2, bucket_mb=0.05)
    transport.connect(engine)
    for version in (0, 1, 2, 1):
        transport.push(weights.items(), version)
        for file in tmp_path.glob(f"weights-{version:08d}-*"):
            os.utime(file)
    assert engine.version == 1
    written = [file.name.rsplit("-", 1) for file in sorted(tmp_path.iterdir())]
    parts = [part for version, part in written if version == "weights-00000001"]
    assert len(parts) > 1
    assert written == [
        [version, part] for version in ("weights-00000001", "weights-00000002") for part in parts
    ]
    held = engine._lm.state_dict()
    assert all(torch.equal(held[name], weight) for name, weight in weights.items())


def test_a_file_is_kept_whatever_its_age(tmp_path):
    """A clock that is behind, or too coarse, makes the file that was just written seem old."""
    transport = CheckpointTransport(str(tmp_path), keep=1)
    os.utime(write(tmp_path, {"a.w": torch.zeros(1)}, 7), (2**33, 2**33))
    path = write(tmp_path, {"a.w": torch.ones(1)}, 8)
    transport.end_push(8)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_the_engine_as_it_is(
    tmp_path, tiny_model, monkeypatch
):
    engine = TransformersEngine(device="cpu")
    engine.start(tiny_model)
    weights = dict(Policy(str(tiny_model)).named_weights())
    transport = CheckpointTransport(str(tmp_path))
    transport.connect(engine)
    transport.push(weights.items(), 0)

    def full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DamagedWeightsError, match=r"cannot write version 1 to .*no space left"):
        transport.push([(name, weight + 1) for name, weight in weights.items()], 1)
    assert engine.version == 0
    held = engine._lm.state_dict()
    assert all(torch.equal(held[name], weight) for name, weight in weights.items())


def test_what_a_push_takes_of_a_gpu_is_its_buckets_not_a_copy(monkeypatch):
    assert MemoryTransport().gpu_bytes == CollectiveTransport("gloo").gpu_bytes == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for keep_copy in (True, False):
        transport = CollectiveTransport(bucket_mb=64, keep_copy=keep_copy)
        assert transport.gpu_bytes == 2 * 64 * 2**20
    assert IPCTransport(bucket_mb=16).gpu_bytes == 16 * 2**20
    assert NCCLTransport(bucket_mb=16).gpu_bytes == 3 * 16 * 2**20


# -------------------------------------------------------------------- documentation


def test_the_pair_table_is_what_the_classes_say():
    """Each pair that the table denies is refused by ``connect``, too."""
    page = (Path(__file__).parents[3] / "docs" / "sync.md").read_text(encoding="utf-8")
    table = page.partition("<!-- pairs -->\n")[2].partition("\n\n")[0]
    head, _, *rows = (
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()
    )
    assert {row[0] for row in rows} == {
        name
        for name in names.MODULE_OF
        if name.endswith("Transport") and not isabstract(names.public(name))
    }
    for name, *cells in rows:
        transport = names.public(name)
        for engine, cell in zip(head[1:], cells, strict=True):
            reached = issubclass(names.public(engine), transport.reaches)
            assert reached == (cell != "–"), f"{name} to {engine}"


def test_a_weight_groups_store_listens_at_its_host_and_nowhere_else():
    group = BroadcastGroup("127.0.0.1", 0, rank=0, size=1, backend="gloo", timeout_s=10)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            if state == "0A" and int(port, 16) == group.port:  # listens
                found.add(address)
    assert found == {"0100007F"}
    with pytest.raises(ConfigError, match=r"cannot listen at host='192.0.2.1'"):
        BroadcastGroup("192.0.2.1", 0, rank=0, size=1, backend="gloo", timeout_s=1)
