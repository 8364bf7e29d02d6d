"""Type hints: the values they allow in a configuration; import paths: the objects they name."""

import inspect
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser

# The one debt here: what a class takes, base classes included, jsonargparse says only by private
# names: these two, and ``_actions`` and ``_typehint`` of a command's parser (mistakes.py,
# cli/app.py). So setup.cfg allows one minor version; tests/support/bad_configs.py shows
# if the next works.
from jsonargparse._parameter_resolvers import ParamData, get_signature_parameters

from lightning_rl.config import names
from lightning_rl.config.names import MODULE_OF
from lightning_rl.config.packages import OPTIONAL_CLASSES, lacking
from lightning_rl.errors import ConfigError

FUNCTION = "a function (in YAML by its import path)"


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return ``; did you mean X?`` for the closest known word, or an empty text."""
    lower = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    return f"; did you mean {lower[close[0]]}?" if close else ""


@cache
def parameters(component: Callable[..., Any]) -> dict[str, ParamData]:
    """Return all keyword arguments of a class or function, including those passed to a base by
    ``**``.
    """
    return {p.name: p for p in get_signature_parameters(component, logger=False)}


def branches(hint: Any) -> list[Any]:
    """Return the members of a union, or any other hint alone."""
    if get_origin(hint) in (Union, types.UnionType):
        return [inner for member in get_args(hint) for inner in branches(member)]
    return [hint]


def classes(hint: Any) -> list[type]:
    """Return the classes of which ``class_path`` may name a subclass under this hint."""
    result: list[type] = []
    for branch in branches(hint):
        if get_origin(branch) is Callable and get_args(branch):  # called to make an instance
            result += classes(get_args(branch)[-1])
        elif (
            inspect.isclass(branch)
            and get_origin(branch) is None
            and branch.__module__ not in ("builtins", "datetime", "pathlib", "typing")
            and not issubclass(branch, str)  # a text of some form, such as PromptPath
        ):
            result.append(branch)
    return result


def text_forms(hint: Any) -> list[type[str]]:
    """Return the text types that a hint names, such as ``PromptPath``."""
    kinds = [branch for branch in branches(hint) if inspect.isclass(branch)]
    return [kind for kind in kinds if issubclass(kind, str) and kind is not str]


def supplied_arguments(hint: Any) -> int:
    """Count the leading arguments that the caller supplies, e.g. 1 for an OptimizerCallable."""
    for branch in branches(hint):
        if get_origin(branch) is Callable and classes(branch):
            given = get_args(branch)[0]
            return len(given) if isinstance(given, list) else 0
    return 0


def item_hint(hint: Any) -> Any | None:
    """Return the hint of a list's items; None if no list is allowed."""
    for branch in branches(hint):
        origin, arguments = get_origin(branch), get_args(branch)
        if inspect.isclass(origin) and issubclass(origin, Iterable) and len(arguments) == 1:
            return arguments[0]
    return None


def mapping_hint(hint: Any) -> Any | None:
    """Return the hint of a mapping's values; None if no mapping with text keys is allowed."""
    for branch in branches(hint):
        if get_origin(branch) is dict and get_args(branch)[:1] == (str,):
            return get_args(branch)[1]
    return None


def accepts(hint: Any, value: Any) -> bool:
    """Return True if the configuration parser accepts this value."""
    if is_dataclass(hint) and not isinstance(value, Mapping):
        return False  # the parser takes anything then, of which nothing can be made
    try:
        parser = _parser_of(hint)
    except ValueError:
        return True  # a hint that jsonargparse does not check
    try:
        parser.parse_object({"value": _with_path(value, hint)})
    # An ArgumentError, or whatever the import of a user's module raises; it may end the program.
    except (Exception, SystemExit):
        return False
    return True


def parse(hint: Any, value: Any) -> Any:
    """Convert a value as the parser does under a hint."""
    parser = _parser_of(hint)
    return parser.instantiate(parser.parse_object({"value": _with_path(value, hint)})).value


def _with_path(value: Any, hint: Any) -> Any:
    """Expand a short name to an import path: the parser refuses names that two classes share."""
    name = value.get("class_path") if isinstance(value, Mapping) else value
    if not isinstance(name, str) or "." in name or not (bases := classes(hint)):
        return value
    if (kind := class_called(name, bases)) is None:
        return value
    path = f"{kind.__module__}.{kind.__qualname__}"
    return {**value, "class_path": path} if isinstance(value, Mapping) else path


def _parser_of(hint: Any) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    return parser


def describe(hint: Any) -> str:
    """A hint in words: ``int or null``, ``one of 'a', 'b'``, ``a list, each item: float``."""
    choices = [c for b in branches(hint) if get_origin(b) is Literal for c in get_args(b)]
    words = [_describe_branch(b) for b in branches(hint) if get_origin(b) is not Literal]
    if choices:
        words.insert(0, "one of " + ", ".join(dict.fromkeys(map(str, choices))))
    return " or ".join(dict.fromkeys(words))


def _describe_branch(branch: Any) -> str:
    if branch is type(None):
        return "null"
    if get_origin(branch) is Callable:
        made = classes(branch)
        return " or ".join(c.__name__ for c in made) if made else FUNCTION
    if get_origin(branch) is dict:
        return "a mapping"
    if get_origin(branch) is type:
        return f"the import path of a subclass of {get_args(branch)[0].__name__}"
    if (item := item_hint(branch)) is not None:
        return f"a list, each item: {describe(item)}"
    if text_forms(branch):
        meaning = str(branch.__doc__).rstrip(".")
        return meaning[0].lower() + meaning[1:]
    if inspect.isclass(branch) and is_dataclass(branch) and not inspect.isabstract(branch):
        return f"keys of {branch.__name__} (e.g. {_example_of(branch)})"
    return getattr(branch, "__name__", str(branch))


def _example_of(component: type) -> str:
    name, first = next(iter(parameters(component).items()))
    default = "..." if first.default is inspect.Parameter.empty else first.default
    return f"{{{name}: {default}}}"


def class_names(bases: list[type]) -> dict[str, type]:
    """Return the classes that ``class_path`` may name, by short name: ours, and all that are
    imported.
    """
    names.load_all()
    return _imported(bases)


def class_called(name: str, bases: list[type]) -> type | None:
    """Return the class that a short name means; None if there is none.

    Raises:
        ConfigError: if an installed package adds that name, and the class cannot be imported.
    """
    if name in MODULE_OF or name in names.added():
        names.public(name)
    return _imported(bases).get(name)


def _imported(bases: list[type]) -> dict[str, type]:
    """Return the classes imported so far, by short name.

    If several share a name, the last one wins, but torch's and ours are never replaced:
    bitsandbytes, for instance, has its own ``AdamW``, which would appear as soon as something
    imports it.
    """
    result: dict[str, type] = {}
    for kind in (c for base in bases for c in subclasses(base)):
        known = result.get(kind.__name__)
        if known is None or not known.__module__.startswith(("torch.", "lightning_rl.")):
            result[kind.__name__] = kind
    return result


def subclasses(base: type) -> Iterator[type]:
    """Yield ``base`` and all imported public subclasses that can be instantiated."""
    if not inspect.isabstract(base) and not base.__name__.startswith("_"):
        yield base
    children: list[type] = base.__subclasses__()
    for child in children:
        yield from subclasses(child)


def named_class(name: str, bases: list[type]) -> Any:
    """Return the class (or function) that ``class_path: name`` means.

    Raises:
        ConfigError: if there is none, or it is of another kind.
    """
    wanted = " or ".join(base.__name__ for base in bases)
    if "." not in name:
        if (meant := class_called(name, bases)) is not None:
            return meant
        if name in OPTIONAL_CLASSES and name not in names.added():
            raise ConfigError(f"{name} is not installed; {lacking(OPTIONAL_CLASSES[name])}")
        known = class_names(bases)
        own = known.keys() & MODULE_OF.keys()
        shown = ", ".join(sorted(own or known)[:15])
        raise ConfigError(
            f"no {wanted} is called {name!r}{did_you_mean(name, known)} (known: {shown}; any other "
            "by its import path, e.g. my_module.MyClass)"
        )
    result = import_object(name)
    if not callable(result):
        raise ConfigError(f"{name} is not a {wanted} but a {type(result).__name__}")
    if inspect.isclass(result) and not issubclass(result, tuple(bases)):
        raise ConfigError(f"{name} is not a {wanted} but a {result.__mro__[1].__name__}")
    return result


def is_class_name(name: str, bases: list[type]) -> bool:
    """Return True if :func:`named_class` finds something."""
    try:
        found = named_class(name, bases) if "." in name else class_called(name, bases)
    except ConfigError:
        return False
    return found is not None


def makes(function: Callable[..., Any], hint: Any) -> bool:
    """Return True if a function may stand for a class under this hint: it is called to make an
    instance, or says in its annotations that it returns one.
    """
    if any(get_origin(branch) is Callable for branch in branches(hint)):
        return True
    try:
        returned = get_type_hints(function).get("return")
    except (NameError, TypeError):  # a built-in function, or a name that is known only to mypy
        return False
    return inspect.isclass(returned) and issubclass(returned, tuple(classes(hint)))


def is_read_as_null(text: str, hint: Any) -> bool:
    """Return True for a text such as ``"null"`` or ``"~"``, in quotes, that the parser reads again
    and takes for null.
    """
    if text.strip() not in ("null", "Null", "NULL", "~"):
        return False
    return accepts(hint, text) and parse(hint, text) is None


def import_object(path: str) -> Any:
    """Return the object that a dotted import path names.

    Raises:
        ConfigError: says whether the module or the name in it is missing, and where we looked.
    """
    first, *rest = path.split(".")
    if not rest or not all(part.isidentifier() for part in (first, *rest)):
        raise ConfigError(
            f"{path!r} is not an import path; write module.name, e.g. my_rewards.exact"
            f"{did_you_mean(path, MODULE_OF)}"
        )
    result, place = _import(first), first
    if result is None:
        raise ConfigError(
            f"{path!r}: there is no module {first!r}; looked in {Path.cwd()}, PYTHONPATH and the "
            "installed packages"
        )
    for part in rest:
        if not hasattr(result, part) and inspect.ismodule(result):
            _import(f"{place}.{part}")  # sets the attribute, if there is such a submodule
        if not hasattr(result, part):
            file = getattr(result, "__file__", None) or ", ".join(getattr(result, "__path__", []))
            if f"{place}.{part}" in OPTIONAL_CLASSES.values():
                raise ConfigError(f"{path!r} is not installed; {lacking(f'{place}.{part}')}")
            raise ConfigError(
                f"{path!r}: {place} has no {part!r}{did_you_mean(part, dir(result))}"
                + (f" (looked in {file})" if file else "")
            )
        result, place = getattr(result, part), f"{place}.{part}"
    return result


def import_path(name: str) -> str:
    """Return the import path of a public name; any other text unchanged."""
    if name in names.added():
        return names.added()[name].value.replace(":", ".")
    homes = names.HOME | OPTIONAL_CLASSES
    return f"{homes[name]}.{name}" if name in homes else name


def _import(module: str) -> types.ModuleType | None:
    """Return the module, or None if no module has this name."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module or "is not a package" in str(error):
            return None
        raise ConfigError(f"{module} imports {error.name!r}, which is not installed") from error
    except Exception as error:  # the user's module, which may do anything when imported
        raise ConfigError(
            f"module {module!r} fails when imported: {type(error).__name__}: {error}"
        ) from error
    except SystemExit as error:
        raise ConfigError(
            f"module {module!r} ends the program when imported (sys.exit({error.code!r})); put "
            'what it does as a script under `if __name__ == "__main__":`'
        ) from error
