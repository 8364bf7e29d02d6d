"""Build the objects of a configuration, without a run of them."""

from typing import Any

from lightning_rl.cli.app import RLCLI


class Built(RLCLI):
    """Builds what a configuration names, and runs nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass

    def _dump_config(self) -> None:
        self.config_dump: dict[str, Any] = {}  # it is for checkpoints, and there will be none
