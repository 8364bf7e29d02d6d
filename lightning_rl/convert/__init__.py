"""Conversion of another library's configuration to ours."""

from lightning_rl.cli import Command

COMMAND = Command(
    "lightning_rl.convert.main",
    "read a configuration of TRL, verl or prime-rl and write ours, saying what it could not carry",
    imports=False,
)
