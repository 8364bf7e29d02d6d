"""Mistakes in a configuration, found before the parser sees it and reported in a line or two.

jsonargparse reports a wrong value as the failure of every member of every union around it, ignores
some unknown keys, and takes ``--trainer.max_epoch`` for an abbreviation. So the sources are first
checked against the real signatures: each key must be a parameter, each ``class_path`` a class, and
each value acceptable to the parser for its type hint.
"""

import inspect
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_rl.config import names
from lightning_rl.config.hints import (
    FUNCTION,
    accepts,
    branches,
    class_names,
    classes,
    describe,
    did_you_mean,
    import_object,
    import_path,
    is_class_name,
    is_read_as_null,
    item_hint,
    makes,
    mapping_hint,
    named_class,
    parameters,
    supplied_arguments,
    text_forms,
)
from lightning_rl.config.layers import INHERITED, SPEC, Key, Sources, name_of
from lightning_rl.config.names import MODULE_OF
from lightning_rl.errors import ConfigError, LightningRLError

_SCALARS = (bool, int, float, str)
_BITS = 63
"""Maximum bits of an integer, as Lightning, torch and engines count with int64."""
_BYTES = 255
"""Maximum bytes of the name of a file or folder, on all usual file systems."""
_PLACE = re.compile(r"(.*_)?(path|dir|dirpath|directory|file|filename|name|version|output|model)")
"""Keys whose texts become names of files and folders."""


def check_sources(
    sources: Sources, parser: ArgumentParser, complete: bool = True, files: bool = True
) -> None:
    """Check what the user wrote against the options of a command's parser.

    Bare names of classes and functions in the tree are replaced by their import paths, as the
    parser knows no others where any callable is allowed.

    Args:
        sources: files and options.
        parser: the command's parser.
        complete: treat a missing required argument as a mistake too.
        files: allow a file name in place of a part of the configuration.

    Raises:
        ConfigError: names key, value, place and fix of the first mistake.
    """
    options = {a.dest: a for a in parser._actions if hasattr(a, "_typehint")}
    try:
        _Walk(complete, files).options(sources.tree, options, ())
        required: list[str] = [dest for dest in ("model", "data") if dest in options]
        required += [dest for dest, action in options.items() if action.required]
        for dest in required:
            if complete and sources.tree.get(dest) is None:
                raise _Mistake((dest,), f"is missing; give a --config file with it, or --{dest}")
    except _Mistake as mistake:
        source = sources.place(mistake.key)
        raise ConfigError(
            f"{name_of(mistake.key)}: {mistake.what}" + (f"\n  at {source}" if source else "")
        ) from mistake.__cause__


class _Mistake(Exception):
    def __init__(self, key: Key, what: str) -> None:
        super().__init__(what)
        self.key = key
        self.what = what


class _Walk:
    """One method per kind of node; each raises ``_Mistake`` at the innermost wrong key."""

    def __init__(self, complete: bool, files: bool) -> None:
        self._complete = complete
        self._files = files

    def options(self, tree: dict[str, Any], options: dict[str, Any], key: Key) -> None:
        """Check top-level keys and groups such as ``trainer``."""
        for name, value in tree.items():
            dest = ".".join(map(str, (*key, name)))
            if dest in options:
                hint, default = options[dest]._typehint, options[dest].default
                tree[name] = self.value(value, hint, default, (*key, name))
            elif any(option.startswith(f"{dest}.") for option in options):
                if isinstance(value, dict):
                    self.options(value, options, (*key, name))
                elif not self._stands_for_a_part(value, (*key, name)):
                    raise _Mistake((*key, name), f"expected keys below it, got {value!r:.60}")
            else:
                depth = len(key)
                prefix = "".join(f"{part}." for part in key)
                known = {o.split(".")[depth] for o in options if o.startswith(prefix)}
                raise _Mistake((*key, name), _no_such_key(name, known, ".".join(map(str, key))))

    def value(self, value: Any, hint: Any, default: Any, key: Key) -> Any:
        """Check a value against its type hint; returns it with the import paths of bare names."""
        if value is None:
            if default is not None and not {type(None), Any} & set(branches(hint)):
                raise _Mistake(key, f"expected {describe(hint)}, got null")
            return value
        if isinstance(value, int) and value.bit_length() > _BITS:
            raise _Mistake(
                key, f"{value!s:.20}... has {value.bit_length()} bits, and may have {_BITS}"
            )
        text = value
        if isinstance(value, dict) and value.keys() <= {"class_path", INHERITED}:
            text = value.get("class_path")  # merged with what names a class in another source
        if isinstance(text, str) and (text_forms(hint) or _PLACE.fullmatch(str(key[-1]))):
            _require_names(text, key)
        if isinstance(text, str) and any(accepts(form, text) for form in text_forms(hint)):
            return text
        if isinstance(value, str) and is_read_as_null(value, hint):
            raise _Mistake(key, f"the text {value!r} is read as null; write null without quotes")
        made = classes(hint)
        other = {str, Path, Any} & set(branches(hint))
        if (made or not other) and self._stands_for_a_part(value, key):
            return value
        if made and isinstance(value, str):
            known = is_class_name(value, made)
            if not any(b in _SCALARS for b in branches(hint)):
                if not known and accepts(hint, value):
                    return value  # an enum's member, say
                known = True
            if known:
                value = {"class_path": value}  # engine: VLLMLocal, without arguments
        if made and isinstance(value, dict):
            return self.instance(value, hint, default, key)
        if FUNCTION in describe(hint):
            if isinstance(value, dict) and "class_path" in value:
                return self.callable(value, key)
            if isinstance(value, str) and item_hint(hint) is None:
                value = import_path(value)
                if _is_class(value):
                    return self.callable({"class_path": value}, key)
        if isinstance(value, dict) and (inside := mapping_hint(hint)) is not None:
            return {n: self.value(inner, inside, None, (*key, n)) for n, inner in value.items()}
        if isinstance(value, list) and (item := item_hint(hint)) is not None:
            return [self.value(inner, item, None, (*key, i)) for i, inner in enumerate(value)]
        if not accepts(hint, value):
            raise _Mistake(key, _wrong_value(value, hint, made))
        return value

    def _stands_for_a_part(self, value: Any, key: Key) -> bool:
        """Return True if the value is the name of a configuration file, which the parser reads."""
        if not isinstance(value, str) or not os.path.isfile(value):
            return False
        if not self._files:
            what = f"{value!r} is a configuration file, which is not read here"
            raise _Mistake(key, f"{what}; give it with --config")
        names.load_all()  # the parser knows short names of what has been imported
        return True

    def instance(self, spec: dict[str, Any], hint: Any, default: Any, key: Key) -> Any:
        """Check ``{class_path, init_args}``, or the arguments of a dataclass or the default's
        class.
        """
        bases = classes(hint)
        name = spec.get("class_path")
        if name is None:
            component = _implied_class(bases, default)
            if component is None and accepts(hint, spec):
                return spec  # a TypedDict, say
            if component is None and len(bases) == 1 and [*class_names(bases).values()] == bases:
                component = bases[0]  # there is no other
            if component is None:
                kinds = " or ".join(base.__name__ for base in bases)
                known = sorted(class_names(bases))
                ours = [name for name in known if name in MODULE_OF]
                shown = ", ".join((ours or known)[:8])
                raise _Mistake(key, f"needs a class_path: which {kinds}? (e.g. {shown})")
            arguments = {k: v for k, v in spec.items() if k not in SPEC}
            arguments |= spec.get("init_args") or {}
            from_scratch = default is None or default is inspect.Parameter.empty
            checked = self.arguments(arguments, component, hint, key, from_scratch)
            more = spec.get("dict_kwargs")
            return {"init_args": checked, "dict_kwargs": more} if more else checked
        try:
            component = named_class(str(name), bases)
        except ConfigError as error:
            raise _Mistake((*key, "class_path"), _no_such_class(str(name), hint, error)) from error
        if not inspect.isclass(component) and not makes(component, hint):
            kinds = " or ".join(base.__name__ for base in bases)
            what = f"{name} is a function, and a {kinds} is needed"
            raise _Mistake((*key, "class_path"), f"{what}; name a class")
        if inspect.isabstract(component):
            message = f"{name} is abstract; name a class derived from it"
            raise _Mistake((*key, "class_path"), message)
        checked = self.spec(spec, component, hint, key)
        alone = not inspect.isclass(component) and checked.keys() == {"class_path"}
        return (
            checked["class_path"] if alone else checked
        )  # the parser knows a function by its path

    def callable(self, spec: dict[str, Any], key: Key) -> dict[str, Any]:
        """Check a callable given as an instance of any class, such as a reward."""
        try:
            component = import_object(import_path(str(spec["class_path"])))
        except ConfigError as error:
            raise _Mistake((*key, "class_path"), str(error)) from error
        return self.spec(spec, component, Any, key)

    def spec(self, spec: dict[str, Any], component: Any, hint: Any, key: Key) -> dict[str, Any]:
        """Check what stands beside the name of a class or function."""
        name = str(spec["class_path"])
        stray = [k for k in spec if k not in (*SPEC, INHERITED)]
        if stray:
            known = parameters(component)
            fix = "; move it under init_args" if stray[0] in known else did_you_mean(stray[0], SPEC)
            raise _Mistake((*key, stray[0]), f"no such key beside class_path{fix}")
        given = spec.get("init_args") or {}
        if not isinstance(given, dict):
            raise _Mistake((*key, "init_args"), f"expected arguments of {name}, got {given!r:.60}")
        kept = {k: v for k, v in spec.get(INHERITED, {}).items() if k in parameters(component)}
        given = self.arguments(kept | given, component, hint, (*key, "init_args"), True)
        path = import_path(name)
        if "." not in path:  # a class that has been imported, of no public name
            path = f"{component.__module__}.{component.__qualname__}"
        checked = {"class_path": path, "init_args": given, "dict_kwargs": spec.get("dict_kwargs")}
        return {k: v for k, v in checked.items() if v}

    def arguments(
        self, given: dict[str, Any], component: Any, hint: Any, key: Key, complete: bool
    ) -> dict[str, Any]:
        """Check arguments of a class or function against its signature."""
        known = dict(list(parameters(component).items())[supplied_arguments(hint) :])
        owner = component.__name__
        checked = dict(given)
        for name, value in given.items():
            if name not in known:
                kin = class_names(classes(hint)).values()
                others = {c.__name__ for c in kin if name in parameters(c)} - {owner}
                raise _Mistake((*key, name), _no_such_key(name, known, owner, others))
            expected, default = known[name].annotation, known[name].default
            if expected is not inspect.Parameter.empty:
                checked[name] = self.value(value, expected, default, (*key, name))
        for name, parameter in known.items():
            if self._complete and complete and name not in given and _required(parameter):
                raise _Mistake((*key, name), _missing(owner, parameter.annotation))
        return checked


def _no_such_class(name: str, hint: Any, error: ConfigError) -> str:
    """Explain why a text is not a class, and neither what a text type of the hint reads."""
    for form in text_forms(hint):
        try:
            form(name)
        except ValueError as refusal:
            return f"{refusal}; nor is it a class: {error}"
        return f"{name!r} has no arguments; name a class that has them"
    return str(error)


def _require_names(path: str, key: Key) -> None:
    """Refuse a path with a part that no file or folder can be called."""
    if "\0" in path:
        raise _Mistake(key, f"{path!r:.60} holds a NUL character, as no file's name can; remove it")
    longest = max(len(part.encode(errors="surrogatepass")) for part in path.split("/"))
    if longest > _BYTES:
        raise _Mistake(
            key,
            f"{path[:30]!r}... has a part of {longest} bytes, and the name of a file or folder may "
            f"have {_BYTES}; shorten it",
        )


def _is_class(path: str) -> bool:
    try:
        return inspect.isclass(import_object(path))
    except ConfigError:
        return False


def _implied_class(bases: list[type], default: Any) -> Any | None:
    """Return the class of a mapping without ``class_path``: the default's, or a dataclass."""
    if isinstance(default, dict) and "class_path" in default:
        return import_object(default["class_path"])
    return bases[0] if is_dataclass(bases[0]) and not inspect.isabstract(bases[0]) else None


def _required(parameter: Any) -> bool:
    return parameter.default is inspect.Parameter.empty and parameter.kind not in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )


def _no_such_key(name: Any, known: Iterable[str], owner: str, others: Iterable[str] = ()) -> str:
    known = sorted(known)
    text = f"no such key{f' in {owner}' if owner else ''}{did_you_mean(str(name), known)}"
    if others := sorted(others):
        text += f"; it is a key of {', '.join(others[:3])}"
    if not known:
        return f"{text}, which has no keys"
    return f"{text} (allowed: {', '.join(known)})" if len(known) <= 24 else text


def _wrong_value(value: Any, hint: Any, made: list[type]) -> str:
    """Explain why the hint accepts no such value: a name that does not exist, or a wrong type."""
    try:
        if isinstance(value, str) and FUNCTION in describe(hint) and item_hint(hint) is None:
            import_object(value)
        elif isinstance(value, str) and made:
            meant = did_you_mean(value, class_names(made))
            return f"expected {describe(hint)}, got {value!r}{meant}"
    except ConfigError as error:
        return str(error)
    return f"expected {describe(hint)}, got {value!r:.80}"


def _missing(owner: str, hint: Any) -> str:
    return f"is missing; {owner} needs it ({describe(hint)})"


def check_value(value: Any, hint: Any, default: Any, key: Key) -> Any:
    """Check one value against a type hint, and return it, as :func:`check_sources` does for all.

    Raises:
        ConfigError: names key, value and fix.
    """
    try:
        return _Walk(complete=True, files=True).value(value, hint, default, key)
    except _Mistake as mistake:
        raise ConfigError(f"{name_of(mistake.key)}: {mistake.what}") from mistake.__cause__


def check_names(component: Any, args: Sequence[Any], kwargs: Iterable[str]) -> None:
    """Check that a class knows the arguments it is given, and gets all that it needs.

    Raises:
        ConfigError: names the first unknown or missing one.
    """
    owner, known = component.__name__, parameters(component)
    for name in kwargs:
        if name not in known:
            raise ConfigError(f"{owner}.{name}: {_no_such_key(name, known, owner)}")
    given = {*list(known)[: len(args)], *kwargs}
    for name, parameter in known.items():
        if name not in given and _required(parameter):
            raise ConfigError(f"{owner}.{name}: {_missing(owner, parameter.annotation)}")


def innermost(error: BaseException) -> LightningRLError:
    """Return our own error inside any wrapper, or else the decisive line of a parser's message."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, LightningRLError):
            return seen
        seen = seen.__cause__ or seen.__context__
    noise = ("Does not validate", "Subtypes:", "Errors:", "Given value")
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    wanted = [line for line in lines if not line.startswith(noise) and "NoneType" not in line]
    keys = [line.split('"')[1] for line in wanted if line.startswith("Parser key")]
    rest = [line for line in wanted if not line.startswith(("Parser key", "Problem with given"))]
    # Of a union such as float | Schedule, what the class said and not that it is no float.
    rest.sort(key=lambda line: line.startswith(("Expected a <class", "Not of type")))
    what = (rest or lines or [repr(error)])[0].split(" Got value: Namespace")[0]
    if not isinstance(error, ValueError | TypeError | ArgumentError | MisconfigurationException):
        what = f"{type(error).__name__}: {what}"
    return ConfigError(f"{'.'.join(keys)}: {what}" if keys else what)
