"""Measure what the documentation says by commands: ``python -m benchmarks.floor``, and so on.

Every file here is a command, and every folder but two: its ``__main__.py`` reads the arguments and
prints, the other files are its parts. A command's docstring says what it asks and how it is called.
Its last line is JSON; with ``--save`` most keep it in ``results``, with the machine's description,
and write their tables into the documentation. ``support`` is what several commands share.
"""
