"""Environments for OpenEnv: served somewhere or by a process of their own, played by our models."""

from lightning_rl.openenv.agent import OpenEnvAgent
from lightning_rl.openenv.prompts import OpenEnvPrompts
from lightning_rl.openenv.server import OpenEnvServer
