"""Fields of a request's JSON, read with their types checked; null counts as missing."""

from collections.abc import Mapping
from typing import Any, TypeVar

from lightning_rl.serving.errors import RequestError, unsupported

T = TypeVar("T")

_KINDS = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


class Fields:
    """A JSON object, and its place in the request.

    Args:
        body: the object.
        path: prefix of field names in errors, such as ``messages[0].``.

    Raises:
        RequestError: from every method, if a value has the wrong type.
    """

    def __init__(self, body: Any, path: str = "") -> None:
        if not isinstance(body, dict):
            raise wrong_kind(path.rstrip(".") or "body", body, dict)
        self.body: Mapping[str, Any] = body
        self.path = path

    def get(self, name: str, kind: type[T]) -> T | None:
        """Return a field's value; None if it is missing."""
        value = self.body.get(name)
        if value is None:
            return None
        if kind is float and type(value) is int:
            try:
                return float(value)  # type: ignore[return-value]
            except OverflowError as error:
                told = "a number beyond float64"
                raise wrong_value(self.path + name, told, "numbers") from error
        if type(value) is not kind:
            raise wrong_kind(self.path + name, value, kind)
        if kind is int and not -(2**63) <= value < 2**63:  # type: ignore[operator]
            raise wrong_value(self.path + name, value, "integers of 64 bits")
        return value

    def need(self, name: str, kind: type[T]) -> T:
        """Return the value of a required field."""
        value = self.get(name, kind)
        if value is None:
            where = self.path + name
            raise RequestError(
                f"Missing required parameter: '{where}'.",
                param=where,
                code="missing_required_parameter",
            )
        return value

    def texts(self, name: str) -> list[str]:
        """Return a field that is a string or an array of strings, as a list."""
        value = self.body.get(name)
        if value is None:
            return []
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise wrong_kind(self.path + name, value, list)
        return value

    def refuse(self, name: str, fix: str, *harmless: Any) -> None:
        """Refuse a field of the real API, unless it is missing or has a harmless value."""
        value = self.body.get(name)
        if value is not None and value not in harmless:
            raise unsupported(self.path + name, value, fix)


def wrong_kind(where: str, value: Any, kind: type) -> RequestError:
    """The error for a value of the wrong type."""
    got = _KINDS.get(type(value), type(value).__name__)
    return RequestError(
        f"Invalid type for '{where}': expected {_KINDS[kind]}, but got {got} instead.",
        param=where,
        code="invalid_type",
    )


def wrong_value(where: str, value: Any, allowed: str) -> RequestError:
    """The error for a value that is not allowed."""
    return RequestError(
        f"Invalid value: {value!r:.80}. Supported values for '{where}' are: {allowed}.",
        param=where,
        code="invalid_value",
    )
