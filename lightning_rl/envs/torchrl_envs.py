"""Several torchrl environments: batched by themselves, one after the other, or in processes."""

from typing import Any

from lightning_rl.envs.maker import TorchRLEnv
from lightning_rl.envs.processes import without_main
from lightning_rl.envs.watch import END_S
from lightning_rl.errors import ConfigError


def is_native(env: Any) -> bool:
    """Return True if an environment steps several copies by itself."""
    return env.batch_size.numel() > 1 or len(env.batch_size) == 1


def side_by_side(maker: TorchRLEnv, count: int | None, limit: int | None) -> Any:
    """Create ``count`` environments side by side, with episodes truncated after ``limit`` steps.

    Raises:
        ConfigError: if the environment steps another number of copies by itself.
    """
    from torchrl.envs import InitTracker, SerialEnv, StepCounter, TransformedEnv

    env = maker.made()
    if is_native(env):
        if count is not None and tuple(env.batch_size) != (count,):
            env.close()
            raise ConfigError(
                f"data.env: {maker.name} steps {tuple(env.batch_size)} environments side by side, "
                f"but each process must step {count}; set data.num_envs, or the environment's own "
                "argument"
            )
    else:
        env.close()
        parallel = _in_processes if maker.parallel else SerialEnv
        env = parallel(count or 1, maker.made)
    env = TransformedEnv(env, InitTracker())
    return env if limit is None else env.append_transform(StepCounter(limit))


def _in_processes(count: int, make: Any) -> Any:
    from torchrl.envs import ParallelEnv

    env = ParallelEnv(count, make, mp_start_method="spawn", daemon=True, shutdown_timeout=END_S)
    with without_main():
        env.start()
    return env


def kill(env: Any) -> None:
    """Kill the processes of environments, if they have any."""
    while env is not None:
        processes = vars(env).get("_workers", [])
        for process in processes:
            process.kill()
        for process in processes:
            process.join(END_S)
        env = vars(env).get("_modules", {}).get("base_env")
