"""Options of a command, generated from its settings.

Receives: a dataclass of ``clipwise.config`` and the arguments after the command's name.
Gives: the settings, from the command line first and then from the file that ``--config`` names; or the help text.
``words`` is the way back: the arguments that a run's settings are made of.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from clipwise.config import WORDS, Output, TrainConfig, flag, from_toml, kinds, made
from clipwise.types import InputError

C = TypeVar("C", bound=Output)
ELSEWHERE = {"lr": "learning-rate", "bs": "batch", "batch-size": "batch"}  # what others call our options

_REPEATED = (
    "in a comparison name a method as often as it is to run, --methods 'flat; flat; psac; psac'; runs over several "
    "seeds are an experiment (docs/reproduce.md): write clipwise reproduce FILE --seeds 5"
)
_CLIP = "write it behind the method's name, --method 'flat(1.0)'"
_WEIGHTS = (
    "write clipwise predict --threshold 0.1 where a class is rare; weights of classes are for a loss of your own in "
    "Python (docs/pitfalls.md)"
)
_PERSON = (
    "write --rows-per-person N for how many rows one may have, and '?person=COLUMN' in --data to say whose they are"
)
# what others have and no option here is near to → what to write
ANSWERS = {
    **dict.fromkeys(("seeds", "n-seeds", "runs", "repeats", "repeat"), _REPEATED),
    **dict.fromkeys(("clip", "clip-norm", "max-grad-norm", "l2-norm-clip"), _CLIP),
    **dict.fromkeys(("class-weight", "class-weights", "pos-weight"), _WEIGHTS),
    "threshold": "write it with clipwise predict, once the run is finished",
    **dict.fromkeys(("learning-rates", "lrs", "grid"), "write clipwise compare --methods 'flat @ 0.1; flat @ 0.5'"),
    **dict.fromkeys(
        ("label", "target", "columns", "features"), "write it within --data, 'csv:PATH?label=NAME:low|high'"
    ),
    **dict.fromkeys(("test-size", "test-data", "test-file"), "write '?test_file=PATH' within --data"),
    **dict.fromkeys(("group", "groups", "person", "id"), _PERSON),
    **dict.fromkeys(("metric", "metrics"), "leave it out: accuracy or error is shown, and of two classes the ROC AUC"),
    "loss": "write it in Python, clipwise.train(model, loss, data, …)",
    **dict.fromkeys(("delta-target", "target-delta"), "write --delta 1e-5"),
}


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')}: see {self.prog} --help")


def read(command: str, settings: type[C], arguments: Sequence[str], about: str) -> C | str:
    """The settings that the arguments ask for, or the help text where they ask for that."""
    parser = _parser(command, settings, about)
    found, unknown = parser.parse_known_args(list(arguments))
    given = vars(found)
    if given.pop("help"):
        return parser.format_help()
    if unknown:
        word = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
        if not word.startswith("-"):
            raise InputError(f"unexpected {word!r}: options begin with --, see {parser.prog} --help")
        raise InputError(f"unknown option {word!r}: {_guess(word, parser)}")
    path, known = given.pop("config"), kinds(settings)
    typed = {name: _value(name, known[name], value) for name, value in given.items()}
    return made(settings, from_toml(settings, path) if path is not None else {}, typed)


def words(settings: TrainConfig, first: Sequence[str] = ()) -> list[str]:
    """The arguments of which ``read`` makes these settings: ``first`` in any case, then what is not the default."""
    default = {each.name: each.default for each in dataclasses.fields(settings)}
    others = [name for name in default if name not in first and getattr(settings, name) != default[name]]
    return [word for name in (*first, *others) for word in _typed(name, getattr(settings, name))]


def _typed(name: str, value: Any) -> list[str]:
    """One setting as it is typed."""
    if isinstance(value, bool):
        return [flag(name) if value else _no(name)]
    if isinstance(value, tuple):
        return [flag(name), *value]
    return [flag(name), repr(value).removesuffix(".0") if isinstance(value, float) else str(value)]


def _no(name: str) -> str:
    return f"--no-{flag(name)[2:]}"


def _guess(word: str, parser: argparse.ArgumentParser) -> str:
    """The option that was meant, by its letters alone: all have the same dashes. One that begins so comes first."""
    known = {option.lstrip("-"): option for option in parser._option_string_actions}
    said = word.lstrip("-").replace("_", "-")
    if said in ANSWERS and "model" in known:  # of commands that train
        return ANSWERS[said]
    if said in ("out", "output", "output-dir", "save", "save-dir"):
        return "did you mean '--folder'?" if "folder" in known else "write > FILE behind the command"
    begun = [name for name in known if len(said) > 1 and name.startswith(said)]
    close = begun or difflib.get_close_matches(ELSEWHERE.get(said, said), known, n=1)
    return f"did you mean {known[close[0]]!r}?" if close else f"see {parser.prog} --help"


def filled(text: str, first: str = "") -> str:
    """The text in lines as wide as the terminal, all indented like the first, which begins with ``first``."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)


def _parser(command: str, settings: type[Output], about: str) -> argparse.ArgumentParser:
    fields, known = dataclasses.fields(settings), kinds(settings)
    words = [each for each in fields if each.metadata["positional"]]
    parser = _Parser(
        prog=f"clipwise {command}",
        usage=f"clipwise {command} [options]" + "".join(f" [{_word(each)} ...]" for each in words),
        description=about,
        allow_abbrev=False,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # only what was given is in the result
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    # this command's own options first, those of every command last
    rank = {
        each.name: (each.metadata["group"] == "output", each.name not in settings.__annotations__) for each in fields
    }
    for each in sorted(fields, key=lambda each: rank[each.name]):
        title = each.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add(groups[title], each, known[each.name])
    last = groups["output"]
    last.add_argument("--config", metavar="FILE", default=None, help="read settings from TOML; options win over it")
    last.add_argument("-h", "--help", action="store_true", default=False, help="this text")
    return parser


def _word(each: dataclasses.Field[Any]) -> str:
    """What the help calls one of the words that need no option: METHOD for ``methods``."""
    return each.name.removesuffix("s").upper()


def _add(group: argparse._ArgumentGroup, each: dataclasses.Field[Any], kind: type) -> None:
    text = each.metadata["help"].replace("%", "%%")
    if each.metadata["positional"]:
        group.add_argument(each.name, metavar=_word(each), nargs="*", help=text)
    elif kind is bool and each.default:
        group.add_argument(_no(each.name), dest=each.name, action="store_false", help=f"do not {text}")
        group.add_argument(flag(each.name), dest=each.name, action="store_true", help=argparse.SUPPRESS)
    elif kind is bool:
        group.add_argument(flag(each.name), dest=each.name, action="store_true", help=text)
    elif kind is tuple:  # extend: the option given twice adds up, since what was spent must not get lost
        group.add_argument(flag(each.name), metavar="NAME", nargs="+", action="extend", help=text)
    else:
        shown = "" if each.default is None else f" [{each.default}]"
        metavar = {int: "N", float: "X", str: "TEXT"}[kind]
        group.add_argument(flag(each.name), metavar=metavar, help=text + shown)


def _value(name: str, kind: type, given: Any) -> Any:
    """The value of its type from the words on the command line."""
    if kind is tuple:
        return tuple(piece.strip() for word in given for piece in word.split(";") if piece.strip())
    if kind in (str, bool):
        return given
    over, fraction, under = given.partition("/") if kind is float else (given, "", "")
    try:
        return float(over) / float(under) if fraction else kind(given)
    except (ValueError, ZeroDivisionError):
        expected, example = WORDS[kind]
        raise InputError(f"{flag(name)} must be {expected}, got {given!r}: write {flag(name)} {example}") from None
