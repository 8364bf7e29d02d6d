"""What must still be there after a power cut."""

import os
from pathlib import Path


def sync_directory(directory: Path) -> None:
    """Put the names in a directory on the disk: a file's new name is safe only with its directory.

    Raises:
        OSError: if the disk refuses.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
