"""Test a model that brings its own code, in vLLM: the engine computes what the trainer does."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_rl.engines import Sampling, VLLMLocal
from lightning_rl.errors import EngineError
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import Loading
from tests.support.engine_checks import PROMPTS, ROUNDING, generate, true_logprobs

pytestmark = pytest.mark.slow

CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model


class OwnConfig(Qwen2Config):
    model_type = "own"


class OwnModel(Qwen2Model):
    config_class = OwnConfig


class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture(scope="module")
def own_model(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("own") / "model"
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(directory)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(directory)
    (directory / "modeling_own.py").write_text(CODE)
    config = json.loads((directory / "config.json").read_text())
    names = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    config |= {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {auto: f"modeling_own.Own{name}" for auto, name in names.items()},
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_vllm_runs_a_models_own_code_only_when_it_may(own_model, tmp_path):
    trusted = Loading(trust_remote_code=True)
    save_skeleton(str(own_model), tmp_path, trusted)
    engine = VLLMLocal(max_model_len=128, kv_cache_gb=0.05)
    with pytest.raises(EngineError, match="vLLM did not start"):
        engine.start(tmp_path)
    engine.trust_remote_code = True
    engine.start(tmp_path)
    try:
        policy = Policy(str(own_model), loading=trusted)
        engine.load_weights(policy.named_weights(), 0)
        plain = AutoModelForCausalLM.from_pretrained(own_model, trust_remote_code=True)
        sampling = Sampling(max_tokens=8)
        for prompt, made in zip(PROMPTS, generate(engine, PROMPTS, sampling), strict=True):
            expected = true_logprobs(plain, prompt, made.token_ids, sampling)
            assert made.logprobs == pytest.approx(expected, abs=ROUNDING)
    finally:
        engine.close()
