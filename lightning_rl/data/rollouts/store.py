"""RolloutStore: rollouts in one SQLite file, which can be queried while it grows."""

import json
import sqlite3
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rl.data.rollouts.files import ARRAYS, Recorded, RolloutFile, as_row, from_row
from lightning_rl.errors import DataError
from lightning_rl.rollout import Group, Rollout

FORMAT = 1
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS rollouts (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    run INTEGER NOT NULL,          -- training runs that share the file, from 0
    place INTEGER NOT NULL,        -- of the group in the file, from 1
    state TEXT NOT NULL DEFAULT 'kept',  -- kept, expired, archived, undone
    id TEXT NOT NULL, group_id TEXT NOT NULL, prompt_id TEXT NOT NULL,
    iteration INTEGER NOT NULL, version_min INTEGER, version_max INTEGER,
    reward REAL, status TEXT NOT NULL, finish_reason TEXT, tokens INTEGER NOT NULL,
    created REAL NOT NULL,         -- seconds since 1970
    token_ids BLOB NOT NULL, loss_mask BLOB NOT NULL, logprobs BLOB NOT NULL,
    versions BLOB NOT NULL,        -- little-endian arrays, zlib
    rest TEXT NOT NULL             -- the other fields, JSON
);
CREATE INDEX IF NOT EXISTS rollouts_place ON rollouts (place);
CREATE INDEX IF NOT EXISTS rollouts_id ON rollouts (run, id);
CREATE TABLE IF NOT EXISTS progress (progress TEXT);
PRAGMA user_version = {FORMAT};
"""
_COLUMNS = (
    "run", "place", "id", "group_id", "prompt_id", "iteration", "version_min", "version_max",
    "reward", "status", "finish_reason", "tokens", "created", *ARRAYS, "rest",
)  # fmt: skip


class RolloutStore(RolloutFile):
    """Stores one row per rollout. A batch is one transaction; readers never wait, nor see half of
    one.

    Rows are never deleted. ``state`` says what became of them: ``kept``; ``expired`` and
    ``archived``, too old and too many for the replay buffer; ``undone``, collected after the
    checkpoint from which the run was resumed, and therefore collected again since.

    Args:
        path: the file; it is created on the first write.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._connection: sqlite3.Connection | None = None

    # ---------------------------------------------------------------- as a rollout file

    def append(
        self, rollouts: Sequence[Rollout], iteration: int, progress: dict[str, Any] | None = None
    ) -> None:
        groups: dict[str, Group] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group_id, []).append(rollout)
        self.add(list(groups.values()), iteration, progress=progress)

    def recover(self) -> dict[str, Any] | None:
        if not self.path.exists():
            return None
        found = self.connection.execute("SELECT progress FROM progress").fetchone()
        return self._continuable(None if found is None else json.loads(found[0]), self.last() > 0)

    def read(self) -> Iterator[Recorded]:
        self.require_existing()
        yield from (recorded for _, recorded in self._select("state != 'undone'", ()))

    def groups(self) -> list[Group]:
        self.require_existing()
        groups: dict[int, Group] = {}
        for place, recorded in self._select("state != 'undone'", ()):
            groups.setdefault(place, []).append(recorded.rollout)
        return list(groups.values())

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # ---------------------------------------------------------------- for the replay buffer

    def add(
        self,
        groups: Sequence[Group],
        iteration: int,
        run: int = 0,
        progress: dict[str, Any] | None = None,
    ) -> list[int]:
        """Write groups in one transaction; return their places.

        Rows that the run wrote under the same ids before become ``undone``.
        """
        self.pictures.write(rollout for group in groups for rollout in group)
        with self._transaction() as database:
            first = self.last() + 1
            rows = [
                as_row(rollout, iteration) | {"run": run, "place": index, "created": time.time()}
                for index, group in enumerate(groups, first)
                for rollout in group
            ]
            database.executemany(
                "UPDATE rollouts SET state = 'undone' WHERE run = ? AND id = ?",
                [(run, row["id"]) for row in rows],
            )
            database.executemany(
                f"INSERT INTO rollouts ({', '.join(_COLUMNS)}) "
                f"VALUES ({', '.join(f':{name}' for name in _COLUMNS)})",
                (row | {name: _pack(name, row[name]) for name in ARRAYS} for row in rows),
            )
            if progress is not None:
                database.execute("DELETE FROM progress")
                database.execute("INSERT INTO progress VALUES (?)", [json.dumps(progress)])
        return list(range(first, first + len(groups)))

    def set_state(self, state: str, places: Sequence[int]) -> int:
        """Set the state of the groups at these places; return the number of their rollouts."""
        with self._transaction() as database:
            changed = database.executemany(
                "UPDATE rollouts SET state = ? WHERE place = ?", [(state, p) for p in places]
            )
            return changed.rowcount

    def undo_after(self, place: int, run: int) -> None:
        """Mark all that the run wrote after a place as undone, as it will be collected again."""
        with self._transaction() as database:
            query = "UPDATE rollouts SET state = 'undone' WHERE run = ? AND place > ?"
            database.execute(query, (run, place))

    def graded(self, run: int, first: int, last: int) -> list[tuple[int, float, int]]:
        """Return place, reward and oldest version of the replayable rollouts between two places."""
        query = """
            SELECT place, reward, version_min FROM rollouts
            WHERE run = ? AND place BETWEEN ? AND ? AND status = 'completed'
            AND reward IS NOT NULL AND version_min >= 0 ORDER BY row
        """
        return [tuple(row) for row in self.connection.execute(query, (run, first, last))]

    def group(self, place: int) -> Group:
        """Return the group at a place."""
        return [recorded.rollout for _, recorded in self._select("place = ?", (place,))]

    def last(self) -> int:
        """Return the last group's place; 0 for an empty file."""
        return int(self._one("SELECT max(place) FROM rollouts") or 0)

    def next_run(self) -> int:
        """Return a number for a run that has not written anything yet."""
        found = self._one("SELECT max(run) FROM rollouts")
        return 0 if found is None else int(found) + 1

    # ---------------------------------------------------------------- inside

    @property
    def connection(self) -> sqlite3.Connection:
        """The open database, created if necessary.

        Raises:
            DataError: if the file is not an SQLite database, or not one of this library.
        """
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        if str(self.path) != ":memory:":
            self.path.parent.mkdir(parents=True, exist_ok=True)
        # No transactions but our own; a batch may be collected in another thread than the last.
        database = sqlite3.connect(
            self.path, timeout=30, isolation_level=None, check_same_thread=False
        )
        database.row_factory = sqlite3.Row
        try:
            (found,) = database.execute("PRAGMA user_version").fetchone()
            (tables,) = database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if tables and found != FORMAT:
                raise DataError(
                    f"{self.path} is an SQLite file of another kind (format {found}, expected "
                    f"{FORMAT}); use another file"
                )
            # WAL: readers go on while one process writes. FULL: a commit survives a power cut.
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            if not tables:
                database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        except sqlite3.DatabaseError as error:
            database.close()
            raise DataError(
                f"{self.path}: not an SQLite file, or damaged ({error}); restore it"
            ) from error
        return database

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        database = self.connection
        database.execute("BEGIN IMMEDIATE")
        with database:  # commits, or rolls back what failed
            yield database

    def _one(self, query: str, *values: Any) -> Any:
        return self.connection.execute(query, values).fetchone()[0]

    def _select(self, condition: str, values: Sequence[Any]) -> Iterator[tuple[int, Recorded]]:
        query = f"SELECT * FROM rollouts WHERE {condition} ORDER BY row"
        where = str(self.path)
        try:
            for row in self.connection.execute(query, values):
                where = f"{self.path}: row {row['row']}"
                arrays = {name: _unpack(where, name, row[name]) for name in ARRAYS}
                rollout = from_row(where, dict(row) | arrays, self.pictures)
                yield row["place"], Recorded(where, row["iteration"], rollout)
        except sqlite3.DatabaseError as error:
            raise DataError(
                f"{where}: damaged at or after this row ({error}); restore the file"
            ) from error


def _pack(name: str, values: Sequence[Any]) -> bytes:
    return zlib.compress(np.asarray(values, dtype=ARRAYS[name]).tobytes(), level=1)


def _unpack(where: str, name: str, blob: bytes) -> list[Any]:
    try:
        return np.frombuffer(zlib.decompress(blob), dtype=ARRAYS[name]).tolist()
    except (zlib.error, ValueError, TypeError) as error:
        raise DataError(f"{where}: damaged {name} ({error}); restore the file") from error
