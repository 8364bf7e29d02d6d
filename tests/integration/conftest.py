"""What integration tests share: the tiny model as engines take it, and the fault table."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from torch import Tensor

from lightning_rl.envs.collector import EnvCollector, collector_of
from lightning_rl.envs.maker import EnvMaker
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.sync.staged import StagedTransport
from tests.support.bad_configs import furnish

Fault = Callable[..., AbstractContextManager[None]]


@pytest.fixture(scope="session")
def weights(tiny_model: Path) -> dict[str, Tensor]:
    return dict(Policy(str(tiny_model)).named_weights())


@pytest.fixture(scope="session")
def skeleton(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an engine needs of the tiny model to start: all but its weights."""
    directory = tmp_path_factory.mktemp("skeleton")
    save_skeleton(str(tiny_model), directory)
    return directory


@pytest.fixture(scope="session")
def own_transport(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[StagedTransport]]:
    """The class of docs/extend/transport.md, where processes that are started find it, too."""
    page = Path(__file__).parents[2] / "docs" / "extend" / "transport.md"
    found = re.search(r'```python title="my_transport\.py"\n(.*?)```', page.read_text(), re.DOTALL)
    assert found is not None
    place = tmp_path_factory.mktemp("own_transport")
    (place / "my_transport.py").write_text(found[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        patch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        yield import_module("my_transport").CompressedFiles


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes of a module's scenarios leave."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture
def started() -> Iterator[Callable[..., EnvCollector]]:
    """Starts collectors of five environments, and ends their processes."""
    made = []

    def start(env: EnvMaker, seconds: float = 60.0) -> EnvCollector:
        made.append(collector_of(env, None, seconds))
        made[-1].start(0, 0, 5)
        return made[-1]

    yield start
    for collector in made:
        collector.close()


@pytest.fixture
def fault(record_property: Callable[[str, object], None]) -> Fault:
    """A line of the fault table (``python -m benchmarks.faults``): what is broken in the block.

    ``with fault(injected, happened)`` notes how long the block took; with ``error`` and ``match``
    it must raise that, and what happened is the error's name and ``happened``.
    """

    @contextmanager
    def broken(
        injected: str,
        happened: str,
        error: type[Exception] | tuple[type[Exception], ...] | None = None,
        match: str | None = None,
    ) -> Iterator[None]:
        begin = time.perf_counter()
        if error is None:
            yield
        else:
            with pytest.raises(error, match=match) as caught:
                yield
            happened = f"`{type(caught.value).__name__}` {happened}"
        seconds = time.perf_counter() - begin
        record_property("fault", json.dumps([injected, happened, seconds]))

    return broken


@pytest.fixture
def workplace(tiny_model, tmp_path, monkeypatch) -> Path:
    """The working directory: a good configuration, and the files and modules that it names."""
    furnish(tmp_path, tiny_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything's, put back afterwards
        monkeypatch.setenv(name, "0")
    return tmp_path
