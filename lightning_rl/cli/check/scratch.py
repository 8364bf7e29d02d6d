"""Builds a configuration for ``lightning-rl check`` as ``fit`` would, in a scratch directory."""

from lightning_rl.cli.app import RLCLI
from lightning_rl.run.files.rundir import require_writable


class Built(RLCLI):
    """Builds what ``fit`` would run; its files are written to ``scratch``.

    Args:
        arguments: those of ``fit``.
        scratch: a directory, which the caller deletes.
        fast_dev_run: the most iterations of a fast dev run, which keeps nothing; 0: as configured.
    """

    def __init__(self, arguments: list[str], scratch: str, fast_dev_run: int = 0) -> None:
        self._scratch = scratch
        self._fast_dev_run = fast_dev_run
        super().__init__(["fit", *arguments])

    def before_instantiate_classes(self) -> None:
        given = self.config.fit.trainer.default_root_dir
        if given is not None:
            require_writable(given, "trainer.default_root_dir")
        self.config.fit.trainer.default_root_dir = self._scratch
        if self._fast_dev_run:
            self.config.fit.trainer.fast_dev_run = self._fast_dev_run

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing: only the built objects are needed."""
        self.trainer.logger = None  # it was built, so its configuration is good
