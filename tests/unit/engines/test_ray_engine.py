"""RayEngine before there is a cluster: what it refuses. tests/integration/test_ray.py has one."""

import sys

import pytest

from lightning_rl.engines import RayEngine
from lightning_rl.engines.replicas import ray as ray_engine
from lightning_rl.errors import ConfigError


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(ray_engine, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ray>=2.50,<3'"):
        RayEngine()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"replicas": 0}, "replicas=0 must be >= 1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be >= 1"),
        ({"placement": "NEAR"}, "placement='NEAR' must be one of SPREAD, PACK"),
        ({"address": "ray://head:10001"}, "address='ray://head:10001' must be host:port"),
        ({"address": "head"}, "address='head' must be host:port of a cluster"),
        ({"dtype": "int8"}, "dtype='int8' must be float32"),
        ({"health_every_s": 0}, "health_every_s=0 must be >= 0.1"),
    ],
)
def test_impossible_settings_are_refused_before_ray_starts(monkeypatch, settings, told):
    monkeypatch.setattr(ray_engine, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=told):
        RayEngine(**settings)


def test_an_engine_that_was_never_started_closes_without_ray(monkeypatch):
    monkeypatch.setattr(ray_engine, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails
    engine = RayEngine()
    engine.close()
    assert not engine.running
