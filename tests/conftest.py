"""Share between all tiers one thread, a tiny random model, and hand-made or random rollouts."""

import asyncio
import gc
import os
import random
import re
import signal
import sys
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from tempfile import TemporaryDirectory

gc.disable()  # until all is imported, and all tests are known
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
ARROW = TemporaryDirectory()  # what datasets makes of files; not in a home
os.environ["HF_DATASETS_CACHE"] = ARROW.name
# Each Trainer asks all installed packages for callbacks, which takes longer than the rest of it.
metadata.entry_points = cache(metadata.entry_points)
# vLLM loads it in the middle of a test, where it may miss its own distutils.
if find_spec("setuptools"):
    import_module("setuptools")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightning_rl.data.packing import pack_rollouts
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.rollout import (
    SAMPLED_BY,
    Prompt,
    Rollout,
    RolloutStatus,
    Row,
    SamplingDistribution,
)
from lightning_rl.sync.staged import StagedTransport
from recipes.sort_digits.prepare import make_tokenizer
from tests.support.bad_configs import furnish
from tests.support.doubles import in_double
from tests.support.reports import FailuresAtOnce, FileDurations
from tests.support.small_run import trainer_of

__all__ = ["in_double"]

torch.set_num_threads(1)

VOCABULARY = 16
FREEZE, UNFREEZE = gc.freeze, gc.unfreeze


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--durations-to", type=Path, help="a file for the worker seconds of each test file"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what runs in the background with Ctrl-C ignored, and so would be whatever a
    # test starts and interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    config.pluginmanager.register(FailuresAtOnce(config), "failures_at_once")
    if path := config.getoption("--durations-to"):
        config.pluginmanager.register(FileDurations(path), "file_durations")


@cache
def freeze(with_vllm: bool) -> None:
    FREEZE()


def pytest_collection_finish() -> None:
    """Freeze what is imported by now: looking through it for garbage takes a fifth of the time.

    So does what vLLM imports for its first engine. No other engine freezes anything, and none that
    is closed thaws what it did not freeze.
    """
    freeze(with_vllm=False)
    gc.enable()
    gc.freeze = lambda: freeze(with_vllm="vllm.v1.engine.core" in sys.modules)
    gc.unfreeze = lambda: None


def pytest_runtest_setup() -> None:
    """Draw the same in every test, and in the fixtures made for it, whichever tests ran before."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the collector as it is in a run: what is frozen is what an engine froze."""
    monkeypatch.setattr(gc, "freeze", FREEZE)
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
    UNFREEZE()
    yield
    gc.collect()
    FREEZE()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random 2-layer Qwen2 with grouped-query attention, tied head and tokenizer.

    Tokens: 0 <pad>, 1 <eos>, 2 "=", 3-12 the digits; 13-15 are unused.
    """
    directory = tmp_path_factory.mktemp("tiny") / "model"
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,  # of size 32, the least that vLLM computes on CPUs
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.2,  # far from uniform, so that a wrong input shows in every logprob
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero by default, which would hide a bias left out
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def weights(tiny_model: Path) -> dict[str, torch.Tensor]:
    return dict(Policy(str(tiny_model)).named_weights())


@pytest.fixture(scope="session")
def skeleton(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files that an engine needs to start with the tiny model: all but its weights."""
    directory = tmp_path_factory.mktemp("skeleton")
    save_skeleton(str(tiny_model), directory)
    return directory


@pytest.fixture(scope="session")
def own_transport(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[StagedTransport]]:
    """Yield the class of docs/extend/transport.md, where started processes find it, too."""
    page = Path(__file__).parents[1] / "docs" / "extend" / "transport.md"
    found = re.search(
        r'```python title="my_transport\.py"\n(.*?)```', page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None
    place = tmp_path_factory.mktemp("own_transport")
    (place / "my_transport.py").write_text(found[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        patch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
        yield import_module("my_transport").CompressedFiles


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return seconds that were to be waited, without waiting."""
    waited: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waited.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    monkeypatch.setattr("lightning_rl.run.retry._jitter", random.Random(0))
    return waited


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def furnished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a good configuration, and the files and modules that it names."""
    here = tmp_path_factory.mktemp("furnished")
    furnish(here, tiny_model)
    return here


@pytest.fixture(scope="session")
def make_rollout() -> Callable[..., Rollout]:
    """Make a completed rollout of one row from prompt and completion tokens.

    Keywords set any other field: of the rollout, of its row, and of what it was sampled from.
    """

    def make(prompt: list[int], completion: list[int], /, **fields: Any) -> Rollout:
        columns = fields.pop("columns", {})
        values: dict[str, Any] = {
            "group_id": "g",
            "sample_index": 0,
            "seed": 0,
            "loss_mask": [True] * len(completion),
            "logprobs": [-1.0] * len(completion),
            "versions": [0] * len(completion),
            "status": RolloutStatus.COMPLETED,
            "finish_reason": "stop",
            "reward": 0.0,
        } | fields
        of_row = ("loss_mask", "logprobs", "versions", "role", "routed_experts")
        row = {name: values.pop(name) for name in of_row if name in values}
        sampled = {name: values.pop(name) for name in SAMPLED_BY if name in values}
        values.setdefault("sampling", SamplingDistribution(**sampled))
        return Rollout(
            Prompt("p", "text", prompt, columns), rows=[Row(prompt, completion, **row)], **values
        )

    return make


@pytest.fixture(scope="session")
def random_rollouts(make_rollout: Callable[..., Rollout]) -> Callable[..., list[Rollout]]:
    """Make rollouts that reach corners: shared prompts, one-token completions, holes in masks."""

    def make(
        seed: int, groups: int = 4, group_size: int = 3, longest: int = 9, temperature: float = 0.7
    ) -> list[Rollout]:
        generator = torch.Generator().manual_seed(seed)

        def integer(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (), generator=generator))

        def tokens(count: int) -> list[int]:
            return torch.randint(2, 13, (count,), generator=generator).tolist()

        rollouts = []
        for group in range(groups):
            prompt = tokens(integer(1, longest))
            for sample in range(group_size):
                # The first of each group has the least that a completion can be.
                length = 1 if sample == 0 else integer(2, longest)
                mask = [True, *(integer(0, 3) > 0 for _ in range(length - 1))]
                if length > 2 and sample == 1:  # an environment's token comes first
                    mask = [False, True, *mask[2:]]
                rollouts.append(
                    make_rollout(
                        prompt,
                        tokens(length),
                        group_id=str(group),
                        sample_index=sample,
                        loss_mask=mask,
                        logprobs=[-1.0 if m else 0.0 for m in mask],
                        temperature=temperature,
                        reward=float(integer(0, 4)) / 4,
                    )
                )
        return rollouts

    return make


@pytest.fixture(scope="session")
def random_batch(random_rollouts: Callable[..., list[Rollout]]) -> Callable[..., TensorDict]:
    """Make the same, packed."""
    return lambda seed, **options: pack_rollouts(random_rollouts(seed, **options))


class Batches:
    """A sized iterable; Lightning would take a plain list for several loaders."""

    def __init__(self, batches: list[TensorDict]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[TensorDict]:
        return iter(self.batches)


@pytest.fixture
def train_on(tmp_path: Path) -> Callable[..., Trainer]:
    """Train a PolicyModule on given packed batches, through a real Trainer."""

    def train(
        module: LightningModule,
        batches: list[TensorDict],
        ckpt_path: Path | None = None,
        **options: Any,
    ) -> Trainer:
        trainer = trainer_of(tmp_path, **({"logger": False} | options))
        trainer.fit(module, Batches(batches), ckpt_path=ckpt_path)
        return trainer

    return train
