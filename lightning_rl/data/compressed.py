"""Compressed data files: refused before they are read if they hold far more than text can."""

import os
import zipfile
from typing import Any

from datasets import DownloadConfig, DownloadManager
from fsspec.compression import compr
from fsspec.core import open as open_file

from lightning_rl.errors import DataError

_BEGIN = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_RATIO = 200
"""Text rarely becomes more than 20 times smaller, and repeated text about 100 times."""
_ENOUGH = 2**30
"""Bytes that a file may hold however small it is."""
_PART = 2**20


class CheckedDownloads(DownloadManager):
    """Gives a dataset's builder its files, as ``download_and_prepare`` does by default.

    Raises:
        DataError: for a compressed file that holds more than its bound
            (:func:`require_moderate`); nothing of it has been written by then.
    """

    def __init__(self, builder: Any) -> None:
        config = DownloadConfig(
            cache_dir=builder._cache_downloaded_dir,
            use_etag=False,
            token=builder.token,
            storage_options=builder.storage_options,
        )
        super().__init__(builder.dataset_name, builder.config.data_dir, config, builder.base_path)

    def download(self, url_or_urls: Any) -> Any:
        result = super().download(url_or_urls)
        for path in _flat(result):
            require_moderate(path)
        return result


def _flat(paths: Any) -> list[str]:
    if isinstance(paths, dict):
        paths = list(paths.values())
    return [one for path in paths for one in _flat(path)] if isinstance(paths, list) else [paths]


def require_moderate(path: str) -> None:
    """Require that a compressed file holds at most 1 GiB, or at most 200 times its own size.

    It is decompressed up to that bound, in parts; of other files only the first bytes are read.

    Raises:
        DataError: naming both sizes.
    """
    size = os.path.getsize(path)
    bound = max(_ENOUGH, _RATIO * size)
    if _held(path, bound) > bound:
        raise DataError(
            f"{path}: its {size / 2**20:,.2f} MiB hold more than {bound / 2**20:,.0f} MiB once "
            f"decompressed, over {bound // size:,} times as much; if that is meant, decompress the "
            "file yourself, and name the result"
        )


def _held(path: str, bound: int) -> int:
    """Return how many bytes a compressed file holds, or some number above the bound; 0 if plain."""
    with open(path, "rb") as file:
        begin = file.read(6)
    if begin.startswith(b"PK\x03\x04"):  # readers stop at the sizes it declares
        with zipfile.ZipFile(path) as archive:
            return sum(entry.file_size for entry in archive.infolist())
    kind = next((kind for mark, kind in _BEGIN.items() if begin.startswith(mark)), None)
    held = 0
    if kind in compr:
        with open_file(path, "rb", compression=kind) as file:
            while held <= bound and (part := file.read(_PART)):
                held += len(part)
    return held
