"""Test runs in which two policies write rollouts together, and each learns from its own part."""

import pytest
import torch

from lightning_rl import AsyncCollector, ReplayBuffer, StreamedCollector, VLLMLocal
from lightning_rl.callbacks import Evaluate, HFExport, WeightSync
from lightning_rl.errors import ConfigError
from lightning_rl.extend import Engine, MultiPolicyEngine, VLLMAdapters
from lightning_rl.models.policy import Policy
from tests.support.resumed_cases import roles
from tests.support.small_run import Rows, numbers, trainer_of
from tests.support.tiny_models import save_untied_llama
from tests.support.two_roles import roles_data, roles_module


class Watch(Rows):
    """Records rows of metrics, and which versions wrote what."""

    def __init__(self) -> None:
        super().__init__()
        self.written = []

    def on_collect_end(self, trainer, pl_module, rollouts) -> None:
        versions = {role: set() for role in pl_module.roles}
        for row in (row for rollout in rollouts for row in rollout.rows):
            versions[row.role] |= {v for v, m in zip(row.versions, row.loss_mask, strict=True) if m}
        now = {role: {version} for role, version in pl_module.role_versions.items()}
        self.written.append((versions, now))


def fitted(tiny_model, path, callbacks=(), **options):
    module, watch = roles(tiny_model), Watch()
    torch.manual_seed(0)
    trainer = trainer_of(path, [WeightSync(), *callbacks, watch])
    trainer.fit(module, roles_data(iterations_per_epoch=6, **options))
    return module, watch, trainer


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    callbacks = [HFExport(merge_adapters=True), Evaluate(3)]
    path = tmp_path_factory.mktemp("roles")
    return fitted(tiny_model, path, callbacks, evaluation=numbers(100, 104))


def test_each_is_pushed_when_it_changed_and_tokens_say_whose_version_wrote_them(run):
    module, watch, _ = run
    assert module.role_versions == {"first": 6, "second": 3}
    for name, pushed in (
        ("first", [0, 1, 2, 3, 4, 5, 6]),
        ("second", [0, 1, None, 2, None, 3, None]),
    ):
        assert [row.get(f"sync/{name}/version") for row in watch.rows] == pushed
        gaps = [
            row[f"sync/{name}/probe_gap"] for row in watch.rows if f"sync/{name}/version" in row
        ]
        assert max(gaps) < 1e-4
    assert len(watch.written) == 6
    assert all(versions == now for versions, now in watch.written)
    assert all(row["rollout/staleness_max"] == 0 for row in watch.rows[1:])
    assert watch.rows[-1]["reward/mean"] > 3 * watch.rows[1]["reward/mean"]
    assert watch.rows[-1]["eval/reward_mean"] > 3 * watch.rows[0]["eval/reward_mean"]


def test_each_is_exported_by_itself(run):
    module, _, trainer = run
    [export] = [c for c in trainer.callbacks if isinstance(c, HFExport)]
    for name, policy in module.loaded_policies.items():
        plain = dict(Policy(str(export.target(trainer) / name)).named_weights())
        for key, weight in policy.named_weights():
            torch.testing.assert_close(plain[key], weight, rtol=0, atol=0)


@pytest.mark.slow
def test_an_asynchronous_run_is_as_stale_as_it_may_be_and_no_more(tiny_model, tmp_path):
    module, watch, _ = fitted(tiny_model, tmp_path, collector=AsyncCollector(1))
    assert max(row.get("rollout/staleness_max", 0) for row in watch.rows) == 1
    assert module.role_versions == {"first": 6, "second": 3}


@pytest.mark.slow
def test_a_full_model_of_another_kind_learns_beside_an_adapter(tiny_model, tmp_path):
    save_untied_llama(tmp_path / "llama", tiny_model)
    own = {"model": str(tmp_path / "llama"), "lora": None}
    module, watch = roles_module(tiny_model, second=own), Watch()
    module.configure_model()
    before = {n: p.detach().clone() for n, p in module.loaded_policies["second"].named_parameters()}
    trainer = trainer_of(tmp_path, [WeightSync(), watch])
    trainer.fit(module, roles_data(iterations_per_epoch=2))
    after = dict(module.loaded_policies["second"].named_parameters())
    assert sum(not torch.equal(after[n], before[n]) for n in before) > len(before) / 2
    for row in watch.rows:
        assert max(row[f"sync/{name}/probe_gap"] for name in module.policies) < 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collector": StreamedCollector()}, "has 2 policies, but data.collector=StreamedColl"),
        ({"buffer": ReplayBuffer("b.sqlite")}, "has 2 policies, but data.buffer measures"),
        ({"engine": None}, "holds the weights of one policy, but 2 are trained .first, second."),
    ],
)
def test_what_several_policies_cannot_share_is_refused(options, message, tiny_model, tmp_path):
    with pytest.raises(ConfigError, match=message):
        fitted(tiny_model, tmp_path, **options)


def one_vllm() -> Engine:
    return VLLMAdapters(max_lora_rank=4, max_model_len=64, kv_cache_gb=0.05)


def two_vllms() -> Engine:
    names = ("first", "second")
    return MultiPolicyEngine({n: VLLMLocal(max_model_len=64, kv_cache_gb=0.05) for n in names})


@pytest.mark.slow
@pytest.mark.parametrize("make", [one_vllm, two_vllms])
def test_vllm_writes_what_the_policies_would(make, tiny_model, tmp_path):
    pytest.importorskip("vllm")
    _, watch, _ = fitted(tiny_model, tmp_path, engine=make())
    assert all(versions == now for versions, now in watch.written)
    assert [row.get("sync/second/version") for row in watch.rows] == [0, 1, None, 2, None, 3, None]
    for name in ("first", "second"):
        assert max(row.get(f"sync/{name}/probe_gap", 0) for row in watch.rows) < 1e-3
        assert max(row.get(f"rollout/{name}/logprob_gap_max", 0) for row in watch.rows) < 1e-3
