"""Test when weights are pushed, and how they are cut, compared and written."""

import json
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
from lightning_rl.sync.checkpoint import CheckpointTransport, read_weights, write_safetensors
from lightning_rl.sync.collective import CollectiveTransport
from lightning_rl.sync.group import BroadcastGroup
from lightning_rl.sync.memory import MemoryTransport, cut, fill_buffers
from lightning_rl.sync.native import IPCTransport, NCCLTransport
from lightning_rl.sync.schedule import (
    CollectorSchedule,
    CollectorStatus,
    FixedSchedule,
    SyncState,
    TrainerSchedule,
)
from lightning_rl.sync.stream import WeightStream

IDLE = CollectorStatus()  # what a collector that does not work ahead says
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
        (lambda: MemoryTransport(changed_only=True, keep_copy=False), "set keep_copy: true"),
        (lambda: MemoryTransport(adapters_only=True, keep_copy=False), "set keep_copy: true"),
        (lambda: CheckpointTransport("x", adapters_only=True, changed_only=True), "exclude"),
        (lambda: CollectiveTransport(timeout_s=0), "timeout_s=0 must be"),
        (lambda: CollectiveTransport(backend="mpi"), r"backend='mpi' must be one of .*gloo"),
        (lambda: CheckpointTransport("x", keep=0), "keep=0 must be >= 1"),
        (lambda: CheckpointTransport("x", keep=1, changed_only=True), "keep=1 must be >= 2"),
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


def test_buckets_are_full_but_never_split_a_unit():
    # Each tensor takes a multiple of 64 elements: units of 128, 128, 256 and 128.
    found = list(cut(layers(64, 10, 100, 1), max_numel=256))
    assert [[name[0] for name in part] for part in found] == [
        ["0", "0", "1", "1"],
        ["2", "2"],
        ["3", "3"],
    ]
    assert [len(list(cut(layers(64, 10, 100, 1), n))) for n in (1, 640)] == [4, 1]


class Buffers(dict):
    """Copies weights in bfloat16 into flat buffers by number."""

    def __call__(self, slot, numel, dtype, is_read):
        return self.setdefault(slot, torch.zeros(numel, dtype=dtype))

    def fill(self, weights, shapes=None, numel=10**6, **settings):
        """Copy a push's weights, ``numel`` elements at a time; return the buckets."""
        shapes = shapes or {name: weight.shape for name, weight in weights}
        stream = WeightStream(Push.of(weights), shapes, torch.bfloat16, 0, **settings)
        return [bucket for bucket, _ in fill_buffers(stream, 2 * numel / 2**20, True, self)]


def test_each_weight_has_its_place_in_a_buffer():
    buckets = Buffers().fill(layers(64, 10, 100, 1), numel=256)
    assert [[start for *_, start in bucket["tensors"]] for bucket in buckets] == [
        [0, 64, 128, 192],
        [0, 128],
        [0, 64],
    ]
    assert [bucket["numel"] for bucket in buckets] == [256, 256, 128]


def test_a_bucket_writes_what_changed_in_the_engines_dtype():
    buffers, weights = Buffers(), layers(3, 2)
    (bucket,) = buffers.fill(weights)
    assert bucket["names"] is None  # all
    assert bucket["tensors"][2:] == [("1.0.weight", [2], 128), ("1.1.weight", [2], 192)]
    flat = buffers[0]
    assert flat[:3].tolist() == [0, 0, 0]
    assert flat[128:130].tolist() == [10, 10]

    def changed():
        (bucket,) = buffers.fill(weights, changed_only=True)
        return bucket["names"]

    assert changed() == []
    weights[3][1][0] += 1e-3  # less than bfloat16 can tell: 11.001 -> 11
    assert changed() == []
    weights[3][1][0] += 1
    # Its unit goes as a whole: the engine may fuse the two.
    assert changed() == ["1.0.weight", "1.1.weight"]
    assert flat[192:194].tolist() == [12, 11]


def test_what_is_kept_stays_where_it_was_staged():
    """One of three buckets has nothing that comes, and another a half."""
    buffers, weights = Buffers(), layers(1, 1, 1, 1, 1)
    shapes = {name: weight.shape for name, weight in weights}
    staged = buffers.fill(weights, numel=256)
    assert [bucket["slot"] for bucket in staged] == [0, 1, 2]
    coming = [(name, weight + 100) for name, weight in weights if name[0] in "34"]
    kept = shapes.keys() - dict(coming).keys()
    half, whole = buffers.fill(Push(coming, kept), shapes, staged=staged)
    assert half == staged[1] | {"names": ["3.0.weight", "3.1.weight"]}
    assert whole == staged[2]
    # Units 0 and 1; 2 as it was and 3; 4.
    assert [[int(x) for x in buffers[slot][::64]] for slot in range(3)] == [
        [0, 1, 10, 11],
        [20, 21, 130, 131],
        [140, 141],
    ]
    with pytest.raises(IncompleteWeightsError, match=r"lacks 2 .*'0\.0\.weight'"):
        buffers.fill(Push(coming, kept - {"0.0.weight", "0.1.weight"}), shapes, staged=staged)


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


def write(path, weights, version=3, dtype=torch.float32):
    shapes = {name: weight.shape for name, weight in weights.items()}
    write_safetensors(path, WeightStream(weights.items(), shapes, dtype, version))


def test_files_are_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    weights = {"a": torch.randn(3, 5), "b.c": torch.randn(7), "scalar": torch.tensor(2.0)}
    weights["transposed"] = torch.randn(4, 2).T
    for dtype in (torch.float32, torch.bfloat16):
        write(path, weights, dtype=dtype)
        loaded = load_file(path)
        assert loaded.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(loaded[name], weight.to(dtype))
        read = dict(read_weights(str(path), 3, ["scalar", "a"]))
        assert list(read) == ["scalar", "a"]


@pytest.mark.parametrize("lost", [1, 60, 150])
def test_a_file_cut_short_is_refused(tmp_path, lost):
    path = tmp_path / "x.safetensors"
    write(path, {"a": torch.randn(3, 5)})  # 60 bytes of data
    os.truncate(path, path.stat().st_size - lost)
    with pytest.raises(DamagedWeightsError, match=r"x\.safetensors cannot be read"):
        list(read_weights(str(path), 3, None))


def test_a_file_of_another_version_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, {"a": torch.zeros(1)}, version=3)
    with pytest.raises(DamagedWeightsError, match="holds version 3 instead of 4"):
        list(read_weights(str(path), 4, None))
    with pytest.raises(DamagedWeightsError, match="cannot be read"):
        list(read_weights(str(tmp_path / "missing"), 4, None))


def test_old_files_are_removed_by_age(tmp_path, tiny_model):
    """The engine is in this process. A run that resumes from version 1 writes older numbers."""
    engine = TransformersEngine(device="cpu")
    engine.start(tiny_model)
    weights = dict(Policy(str(tiny_model)).named_weights())
    transport = CheckpointTransport(str(tmp_path), keep=2)
    transport.connect(engine)
    for version in (0, 1, 2, 1):
        transport.push(weights.items(), version)
        os.utime(tmp_path / f"weights-{version:08d}.safetensors")
    assert engine.version == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "weights-00000001.safetensors",
        "weights-00000002.safetensors",
    ]
    held = engine._lm.state_dict()
    assert all(torch.equal(held[name], weight) for name, weight in weights.items())


def test_after_a_resume_what_changed_is_told_from_the_file_before(tmp_path):
    """Version 9 is of the run that was resumed, from version 4: its file is older, not newer."""
    base = {"a.q.weight": torch.zeros(2), "b.q.weight": torch.zeros(2)}
    changed = {"b.q.weight": torch.ones(2)}
    transport = CheckpointTransport(str(tmp_path), keep=2, changed_only=True)
    held, told = {}, []
    versions = [(9, base | changed, False), (4, base, False), (5, base | changed, True)]
    for age, (version, weights, changed_only) in enumerate(versions):
        shapes = {name: weight.shape for name, weight in weights.items()}
        stream = WeightStream(
            weights.items(), shapes, torch.float32, version, "weights", changed_only
        )
        (bucket,) = transport.stage(stream)
        told.append(bucket["names"])
        held |= dict(transport.fetch(bucket))  # as an engine has it that goes from each to the next
        os.utime(bucket["path"], ns=(age, age))
    assert told == [None, None, ["b.q.weight"]]
    assert all(torch.equal(held[name], weight) for name, weight in (base | changed).items())


def test_a_file_is_kept_whatever_its_age(tmp_path):
    """A clock that is behind, or too coarse, makes the file that was just written seem old."""
    transport = CheckpointTransport(str(tmp_path), keep=1)
    ahead = tmp_path / "weights-00000007.safetensors"
    write(ahead, {"a.w": torch.zeros(1)}, 7)
    os.utime(ahead, (2**33, 2**33))
    weights = {"a.w": torch.ones(1)}
    shapes = {"a.w": torch.Size([1])}
    (bucket,) = transport.stage(WeightStream(weights.items(), shapes, torch.float32, 8))
    assert [name for name, _ in transport.fetch(bucket)] == ["a.w"]
    assert [file.name for file in tmp_path.iterdir()] == ["weights-00000008.safetensors"]


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


def test_bytes_of_a_known_file(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, {"a": torch.tensor([1.0])}, version=0)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 64 == 0
    assert json.loads(content[8 : 8 + length]) == {
        "__metadata__": {"format": "pt", "version": "0"},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    }
    assert content[8 + length :] == b"\x00\x00\x80\x3f"


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
