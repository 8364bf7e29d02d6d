"""One LoRA policy whose engine keeps base and adapters apart: what is pushed and expected."""

from lightning_rl.engines import Sampling
from lightning_rl.learn.lora_layers import largest_rank
from lightning_rl.models.lora import LoRA
from tests.support.engine_checks import PROMPTS, generate, require_written_by
from tests.support.shared_engines import SIZES

FIXED = Sampling(max_tokens=12, min_tokens=12, temperature=0.8)
SMALL = SIZES | {"adapters": "apart"}
# rsLoRA: scaled by 6 / sqrt(9) = 2, not by 6 / 9. Of what vLLM fuses (q, k and v) some parts only.
RANK_STABLE = LoRA(
    rank=9,
    alpha=6.0,
    target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"],
    options={"use_rslora": True},
)


def told(engine, lora):
    """Return an engine that was told of a LoRA, as a data module tells it."""
    engine.configure_lora(largest_rank(lora), lambda: None)
    return engine


def check(plain, asked, version):
    """Require completions of one version, which this model could have written; return them."""
    completions = generate(asked, PROMPTS, FIXED)
    require_written_by(plain, PROMPTS, completions, FIXED)
    assert {v for c in completions for v in c.versions} == {version}
    return completions
