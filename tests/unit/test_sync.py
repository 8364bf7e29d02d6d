"""When weights are pushed, and by what."""

import pytest

from lightning_rl.errors import ConfigError, WeightSyncError
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.schedule import FixedSchedule, SyncState


def test_a_fixed_schedule_waits_for_its_turn():
    schedule = FixedSchedule(every_n_iterations=2)
    pushed, engine = [], 0
    for trainer in range(1, 7):
        if schedule.should_sync(SyncState(trainer, engine)):
            engine = trainer
            pushed.append(trainer)
    assert pushed == [2, 4, 6]


def test_a_schedule_of_zero_is_refused():
    with pytest.raises(ConfigError, match="every_n_iterations=0 must be >= 1"):
        FixedSchedule(every_n_iterations=0)


def test_a_transport_needs_an_engine():
    with pytest.raises(WeightSyncError, match="before connect"):
        MemoryTransport().push([], 0)
