"""The half of prime-rl's configuration that defines the update: loss, advantage, optimizer."""

from typing import Any

from lightning_rl.convert.conversion import Conversion, Given, instance
from lightning_rl.errors import ConfigError

TRAIN, SAMPLING = "orchestrator.train.", "orchestrator.train.sampling."
_ALGO, _LOSS, _OPTIM = "orchestrator.algo.", "trainer.loss.", "trainer.optim."
_REWARD = "lightning_rl.EnvironmentReward"
_DISTILS = ("opd", "opsd")


def carry(given: Given, result: Conversion) -> None:
    """Carry over what defines the update: loss, advantage or teacher, and optimizer.

    Raises:
        ConfigError: for an algorithm without its teacher, or a schedule without its end.
    """
    _optimizer(given, result)
    kind = result.choose(given, _ALGO + "type")
    # The ratio is to the engine's probabilities.
    result.put("model.update.use_rollout_logprobs", True)
    result.put_class("model.aggregation", "TokenMean")
    result.put("data.rewards", [_REWARD])
    if kind in _DISTILS:
        _teacher(given, result, kind)
        return
    low, high = (min(given[f"{_LOSS}dppo_mask_{side}"], 1.0) for side in ("low", "high"))
    result.put_class("model.loss", "DPPO", low=low, high=high, square=given[_LOSS + "kl_tau"])
    result.choose(given, _LOSS + "type")
    name = TRAIN + "filter_zero_advantages"
    if given.look(name) and "selection" not in result.config["data"]["init_args"]:
        result.leave(given, name)
    if kind == "rae":
        result.put_class("model.advantage", "RunningBaseline", decay=given[_ALGO + "decay"])
        result.leave(given, _ALGO + "type", given.row(_ALGO + "decay").note)
    else:
        result.put_class("model.advantage", {"max_rl": "MaxRL"}.get(kind, "DrGRPO"))
    if (tau := given[_LOSS + "adv_tau"]) != 1 and kind == "max_rl":
        result.leave(given, _LOSS + "adv_tau")
    elif tau != 1:
        result.put("data.reward_weights", [tau])


def _teacher(given: Given, result: Conversion, kind: str) -> None:
    """Set a teacher as a reward of weight 0, and its loss, whose bounds prime-rl has fixed.

    Raises:
        ConfigError: if there is none.
    """
    result.put_class("model.advantage", "Distillation")
    result.put_class("model.loss", "DPPO", low=0.2, high=1.0, square=0.001)
    result.leave(given, _ALGO + "type")
    if given.look(SAMPLING + "temperature") != 1:
        result.leave(given, SAMPLING + "temperature")
    if kind == "opsd":
        key, template = given[_ALGO + "demo_key"], given[_ALGO + "template"]
        hint = template.replace("{demonstration}", f"{{{key}}}")
        teacher = instance("lightning_rl.ModelTeacher", model=given.look("model.name"), hint=hint)
        result.leave(given, _ALGO + "template")
    else:
        name, url = given[_ALGO + "teacher.name"], given[_ALGO + "teacher.base_url"]
        if name is None or url is None:
            raise ConfigError("orchestrator.algo.teacher: opd needs its name and base_url")
        key = _ALGO + "teacher.api_key_var"
        secret = {"api_key_env": given[key]} if given.says(key) else {}
        teacher = instance("lightning_rl.ServedTeacher", base_url=url, model=name, **secret)
    result.put("data.rewards", [_REWARD, teacher])
    result.put("data.reward_weights", [1.0, 0.0])


def _optimizer(given: Given, result: Conversion) -> None:
    rate = given[_OPTIM + "lr"]
    options = {"lr": rate, "weight_decay": given[_OPTIM + "weight_decay"]}
    if result.choose(given, _OPTIM + "type") == "sgd":
        options |= {name: given[_OPTIM + name] for name in ("momentum", "nesterov")}
        result.put_class("model.optimizer", "torch.optim.SGD", **options)
    else:
        betas = [given[_OPTIM + "betas1"], given[_OPTIM + "betas2"]]
        result.put_class("model.optimizer", "torch.optim.AdamW", **options, betas=betas, fused=True)
    result.put("model.update.max_grad_norm", given[_OPTIM + "max_norm"])
    _scheduler(given, result, rate)


def _scheduler(given: Given, result: Conversion, rate: float) -> None:
    name = "trainer.scheduler."
    kind, total = result.choose(given, name + "type"), given["max_steps"]
    if kind == "constant":
        return
    warmup, final = given[name + "warmup_steps"], given[name + "min_lr"]
    decay = given[name + "decay_steps"] if kind == "linear" else 1
    if decay and total is None:
        raise ConfigError(f"{name}type={kind}: it needs max_steps")
    steps: dict[str, Any] = {"warmup_steps": warmup}
    if kind == "linear" and decay and decay != total - warmup:
        result.leave(given, name + "decay_steps")
        decay = 0
    if decay:
        steps |= {"total_steps": total, "final": final / rate if rate else 0.0}
    shape = {"cosine": "WarmupCosine"}.get(kind, "WarmupLinear") if decay else "WarmupConstant"
    result.put_class("model.lr_scheduler", shape, **steps)
