"""The file of a pack: a zip archive with known members, read as a stranger's."""

import re
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_rl.errors import DataError
from lightning_rl.run.files import strict_json
from lightning_rl.run.files.rundir import refused

FORMAT = 1
ABOUT = "pack.json"
"""The member that says what is packed, and where it was made."""
_KNOWN = re.compile(
    r"""pack\.json | config\.yaml
    | (checkpoint|expected)\.(json|safetensors)
    | rerun/versions\.jsonl
    | rerun/iteration-[0-9]{6}-[0-9]{3}\.parquet
    | rerun/pictures/[0-9a-f]{64}\.(png|jpg|gif|webp)
    | models/[0-9]{1,3}/(additional_chat_templates/)?
      \w[\w.-]{0,99}\.(json|jinja|txt|model|safetensors)
    | code/([a-zA-Z_]\w{0,99}/){0,9}[a-zA-Z_]\w{0,99}\.py""",
    re.VERBOSE | re.ASCII,
)
_TEXTS = (".json", ".jsonl", ".yaml", ".jinja", ".txt", ".py")
"""Endings of members that are compressed; all others are stored as they are."""
_LARGEST_TEXT, _MOST_TEXT = 2**27, 2**28
"""Bytes of one text, and of all: a vocabulary has about 30 MB."""
_MOST = 2000
"""Most members of a pack."""
MOST_PROCESSES = 64
"""Most processes that unpack starts for a stranger."""
_BLOCK = 2**20


def members_of(folder: Path) -> list[str]:
    """Return the paths of all files in a folder that a pack may hold, in order."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if _KNOWN.fullmatch(path))


def write_archive(folder: Path, out: Path) -> None:
    """Write the members in a folder to a zip archive, which appears when it is complete.

    Raises:
        DiskError: if it cannot be written.
    """
    partial = out.with_name(f"{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(partial, "w") as archive:
            for name in members_of(folder):
                how = zipfile.ZIP_DEFLATED if name.endswith(_TEXTS) else zipfile.ZIP_STORED
                # With the same date for all, so that packs of equal content are equal files.
                member = zipfile.ZipInfo(name)
                member.compress_type, member.file_size = how, (folder / name).stat().st_size
                with (folder / name).open("rb") as source, archive.open(member, "w") as target:
                    while block := source.read(_BLOCK):
                        target.write(block)
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise refused(out, error) from error


def extract_archive(file: Path, folder: Path) -> dict[str, Any]:
    """Check a pack's members, write them to a folder, and return what ``pack.json`` says.

    Raises:
        DataError: if the file is damaged, has a member that no pack has, a link, or one that
            expands to more than a pack's; or if another release wrote it.
    """
    with _opened(file) as archive:
        for member in _checked(file, archive):
            target = folder / member.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("xb") as written:
                while block := source.read(_BLOCK):
                    written.write(block)
    return _about(file, folder)


@contextmanager
def _opened(file: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} is not a pack, or damaged ({error}); ask for it again") from error


def _checked(file: Path, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return all members, none of which is written before all are checked."""
    members = archive.infolist()
    if len(members) > _MOST:
        raise DataError(f"{file} has {len(members)} members; a pack has {_MOST} at most")
    names: set[str] = set()
    for member in members:
        wrong = _fault_of(member)
        if member.filename in names:
            wrong = "is there twice"
        if wrong is not None:
            raise DataError(
                f"{file}: its member {member.filename!r:.100} {wrong}, so it was not written by "
                "lightning-rl pack; do not use it"
            )
        names.add(member.filename)
    texts = sum(m.file_size for m in members if m.filename.endswith(_TEXTS))
    held = sum(m.compress_size for m in members)
    if texts > _MOST_TEXT or held > file.stat().st_size:  # members that share bytes
        raise DataError(
            f"{file} of {file.stat().st_size:,} bytes would expand to more than a pack holds "
            f"({texts:,} bytes of text, at most {_MOST_TEXT:,}); do not use it"
        )
    return members


def _fault_of(member: zipfile.ZipInfo) -> str | None:
    """Return why a member cannot be one of a pack; None if it can."""
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        return "is a link, or another special file"
    if not _KNOWN.fullmatch(member.filename):
        return "is none of those that a pack has"
    if member.flag_bits & 1:
        return "is encrypted"
    if member.filename.endswith(_TEXTS):
        large = member.file_size > _LARGEST_TEXT
        return (
            f"expands to {member.file_size:,} bytes (at most {_LARGEST_TEXT:,})" if large else None
        )
    stored = member.compress_type == zipfile.ZIP_STORED
    return None if stored and member.compress_size == member.file_size else "is compressed"


def _about(file: Path, folder: Path) -> dict[str, Any]:
    for name in (ABOUT, "config.yaml", "rerun/versions.jsonl", "expected.json"):
        if not (folder / name).is_file():
            raise DataError(f"{file} lacks its member {name}; ask for the pack again")
    try:
        about = strict_json.loads((folder / ABOUT).read_bytes())
        version = about["format"]
        numbers = [about["iteration"], about["processes"]]
        if not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError(f"iteration and processes are {numbers}, but must be positive")
        if about["processes"] > MOST_PROCESSES:
            raise ValueError(f"processes is {numbers[1]}, but must be at most {MOST_PROCESSES}")
        median, left_out = about["median_grad_norm"], about["left_out"]
        if median is not None and not (isinstance(median, float) and median >= 0):
            raise ValueError(f"median_grad_norm is {median!r:.20}, but must be a norm or null")
        if not (isinstance(left_out, list) and all(isinstance(one, str) for one in left_out)):
            raise TypeError("left_out must be a list of texts")
        mappings = [about["environment"], about["bases"], *dict(about["bases"]).values()]
        if not all(isinstance(one, dict) for one in mappings):
            raise TypeError("environment, bases and what they hold must be objects")
        if not all(isinstance(d, str) for names in about["bases"].values() for d in names.values()):
            raise TypeError("digests must be texts")
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{file}: {ABOUT} is damaged ({error}); ask for the pack again") from error
    if version != FORMAT:
        raise DataError(
            f"{file} has format {version!r:.20}, but this release reads format {FORMAT}; use the "
            "release that wrote it"
        )
    return dict(about)
