"""What ``lightning-rl check`` says of a run in environments."""

from lightning_rl.envs.base import EnvModule
from lightning_rl.envs.datamodule import EnvDataModule
from lightning_rl.envs.module import ActorCriticModule
from lightning_rl.networks.space import Space


def described(module: EnvModule, data: EnvDataModule) -> list[str]:
    """Make environments and agents, collect a batch, and tell of them.

    Raises:
        ConfigError: if something does not fit.
        EnvError: if an environment goes wrong.
    """
    data.calls.start(data.seed, 0, data.num_envs)
    try:
        return _described(module, data)
    finally:
        data.close()


def _described(module: EnvModule, data: EnvDataModule) -> list[str]:
    lines = [f"environment: {data.env.name}, {data.num_envs} of it side by side"]
    lines += [_seen(name, space) for name, space in data.spaces.items()]
    module.configure_model()
    count = sum(p.numel() for p in module.parameters())
    lines.append(f"agents: {module.described_as} ({count:,} parameters)")
    batch = data.calls(lambda: data.collector.collect(module.agents, 0, data.steps))
    size = sum(value.nbytes for value in batch.values(True, True))
    plan = f"an iteration: {data.steps} steps of each environment, {size / 2**20:.3g} MiB"
    if isinstance(module, ActorCriticModule):
        steps = module.epochs * module.minibatches
        rows = data.frames_per_iteration // module.minibatches
        plan += f"; {steps} optimizer steps on about {rows} frames each"
    lines.append(plan)
    if data.collector.exact:
        lines.append(f"a run that goes on will not be bit-equal: {data.collector.exact}")
    return lines


def _seen(name: str, space: Space) -> str:
    seen = ", ".join(f"{n} {o.shape}" for n, o in space.observations.items())
    acts = ", ".join(f"{n} ({kind})" for n, kind in space.actions.items())
    several = f" ({space.agents} of them)" if space.agents else ""
    return f"  {name}{several} sees {seen} and does {acts}"
