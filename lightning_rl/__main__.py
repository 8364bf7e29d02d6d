"""``python -m lightning_rl`` is ``lightning-rl``."""

import sys

from lightning_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
