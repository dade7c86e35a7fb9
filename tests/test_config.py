"""Settings: TOML there and back, precedence, and messages for what is wrong."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipwise.cli import COMMANDS
from clipwise.cli.options import read, words
from clipwise.config import (
    BenchConfig,
    CalibrateConfig,
    CompareConfig,
    TrainConfig,
    flag,
    from_toml,
    kinds,
    made,
    to_toml,
)
from clipwise.types import InputError

ALL = [command.settings for command in COMMANDS.values()]


def wrote(folder: Path, text: str | bytes) -> Path:
    path = folder / "settings.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@given(
    data=st.text(st.characters(exclude_categories=("Cs",))),
    methods=st.lists(st.text(st.characters(exclude_categories=("Cs",))), max_size=3),
    epsilon=st.none() | st.floats(allow_nan=False),
    delta=st.floats(allow_nan=False),
    batch=st.integers(-(2**63), 2**63 - 1),
    self_test=st.booleans(),
)
def test_settings_written_as_toml_are_read_again_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    data: str,
    methods: list[str],
    epsilon: float | None,
    delta: float,
    batch: int,
    self_test: bool,
) -> None:
    config = CompareConfig(
        data=data, methods=tuple(methods), epsilon=epsilon, delta=delta, batch=batch, self_test=self_test
    )
    path = wrote(tmp_path_factory.mktemp("toml"), to_toml(config))
    assert made(CompareConfig, from_toml(CompareConfig, path)) == config


def test_what_is_written_is_what_defines_the_run_and_not_where_it_ran() -> None:
    written = tomllib.loads(to_toml(TrainConfig(epsilon=3.0, folder="here", quiet=True, threads=2, json=True)))
    assert written["epsilon"] == 3.0
    assert not {"folder", "resume", "quiet", "threads", "json"} & set(written)


def test_an_unknown_key_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown key 'epsilo' in .*settings.toml: did you mean 'epsilon'\?"):
        from_toml(TrainConfig, wrote(tmp_path, "epsilo = 3"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('epsilon = "three"', "epsilon .* must be a number, got 'three': write epsilon = 0.5"),
        ("epsilon = true", "epsilon .* must be a number, got True"),
        ("batch = 2.5", "batch .* must be a whole number, got 2.5: write batch = 100"),
        ("batch = true", "batch .* must be a whole number, got True"),
        ("self_test = 1", "self_test .* must be true or false, got 1"),
        ("data = 3", "data .* must be text, got 3"),
        ("[epsilon]\nvalue = 3", "epsilon .* must be a number, got {'value': 3}"),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_with_expected_and_got(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_toml(TrainConfig, wrote(tmp_path, line))


@pytest.mark.parametrize("line", ['methods = "flat"', "methods = [1]", "methods = {}"])
def test_a_list_of_texts_is_nothing_else(tmp_path: Path, line: str) -> None:
    with pytest.raises(InputError, match="methods .* must be a list of texts, got"):
        from_toml(CompareConfig, wrote(tmp_path, line))


def test_a_whole_number_is_a_number(tmp_path: Path) -> None:
    value = from_toml(TrainConfig, wrote(tmp_path, "epsilon = 3"))["epsilon"]
    assert value == 3.0
    assert type(value) is float


@pytest.mark.parametrize("content", [b"epsilon = ", b"\xff\xfe", b"epsilon = 3\nepsilon = 4\n"])
def test_unreadable_toml_is_a_one_line_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(
        InputError, match="settings.toml must be TOML, got .*: write lines such as epsilon = 3"
    ) as error:
        from_toml(TrainConfig, wrote(tmp_path, content))
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_folder_are_one_line_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(InputError, match="cannot read .*: give a TOML file"):
            from_toml(TrainConfig, path)


def test_a_later_layer_wins_over_an_earlier_one() -> None:
    config = made(TrainConfig, {"epsilon": 3.0, "batch": 8}, {"epsilon": 1.0})
    assert (config.epsilon, config.batch, config.delta) == (1.0, 8, 1e-5)


def test_naming_one_of_two_alternatives_removes_the_other_one_of_the_file() -> None:
    config = made(TrainConfig, {"epsilon": 3.0, "epochs": 2.0}, {"noise_multiplier": 1.0, "steps": 5})
    assert (config.epsilon, config.noise_multiplier) == (None, 1.0)
    assert (config.epochs, config.steps) == (None, 5)


def test_a_rate_stands_in_the_place_of_samples_and_batch_but_one_of_these_not_of_the_other() -> None:
    parts = {"samples": 600, "batch": 6}
    assert made(CalibrateConfig, parts, {"sampling_rate": 0.5}) == CalibrateConfig(sampling_rate=0.5)
    assert made(CalibrateConfig, {"sampling_rate": 0.5}, parts) == CalibrateConfig(samples=600, batch=6)
    assert made(CalibrateConfig, parts, {"batch": 7}) == CalibrateConfig(samples=600, batch=7)


@pytest.mark.parametrize("settings", ALL)
def test_every_setting_has_help_and_an_option(settings: type) -> None:
    about = read("any", settings, ["--help"], "About.")
    assert isinstance(about, str)
    for each in dataclasses.fields(settings):
        assert each.metadata["help"]
        assert each.metadata["positional"] or flag(each.name) in about or f"--no-{flag(each.name)[2:]}" in about


@pytest.mark.parametrize("settings", ALL)
def test_every_setting_is_of_a_type_that_toml_and_options_know(settings: type) -> None:
    assert set(kinds(settings).values()) <= {str, int, float, bool, tuple}


def test_options_are_read_with_their_types() -> None:
    config = read("train", TrainConfig, ["--epsilon", "3", "--batch=8", "--no-self-test", "--json"], "")
    assert config == TrainConfig(epsilon=3.0, batch=8, self_test=False, json=True)
    assert read("bench", BenchConfig, ["--rows", "a", "b;c"], "") == BenchConfig(rows=("a", "b", "c"))


@given(
    data=st.text(st.characters(exclude_categories=("Cs",))).filter(lambda text: not text.startswith("-")),
    epsilon=st.none() | st.floats(0, allow_nan=False),
    steps=st.none() | st.integers(),
    self_test=st.booleans(),
    compile=st.booleans(),
    first=st.sampled_from([(), ("data",), ("method", "data")]),
)
def test_words_are_read_again_as_the_settings_that_they_were_made_of(
    data: str, epsilon: float | None, steps: int | None, self_test: bool, compile: bool, first: tuple[str, ...]
) -> None:
    config = TrainConfig(data=data, epsilon=epsilon, steps=steps, self_test=self_test, compile=compile)
    typed = words(config, first)
    assert read("train", TrainConfig, typed, "") == config
    assert typed[: 2 * len(first) : 2] == [flag(name) for name in first]


def test_what_is_the_default_takes_no_words() -> None:
    assert words(TrainConfig()) == []
    assert words(TrainConfig(epsilon=3.0, self_test=False)) == ["--epsilon", "3", "--no-self-test"]


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = wrote(tmp_path, 'epsilon = 3\nbatch = 8\nmethod = "psac"\nself_test = false\n')
    config = read("train", TrainConfig, ["--config", str(path), "--batch", "16", "--self-test"], "")
    assert config == TrainConfig(epsilon=3.0, batch=16, method="psac", self_test=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epsilo", "3"], r"unknown option '--epsilo': did you mean '--epsilon'\?"),
        (["--epsilo=3"], r"unknown option '--epsilo': did you mean '--epsilon'\?"),
        (["--epsilon", "three"], "--epsilon must be a number, got 'three': write --epsilon 0.5"),
        (["--batch", "2.5"], "--batch must be a whole number, got '2.5': write --batch 100"),
        (["--epsilon"], "--epsilon: expected one argument"),
        (["stray"], "unexpected 'stray': options begin with --"),
    ],
)
def test_a_wrong_option_is_a_one_line_error(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read("train", TrainConfig, words, "")


def test_options_are_not_abbreviated() -> None:
    with pytest.raises(InputError, match="unknown option '--eps'"):
        read("train", TrainConfig, ["--eps", "3"], "")


def test_one_text_in_the_place_of_a_list_is_shown_as_one(tmp_path: Path) -> None:
    """As ``spent`` was, before it took several folders."""
    file = tmp_path / "settings.toml"
    file.write_text('spent = "runs/first"')
    with pytest.raises(InputError, match=r'write spent = \["runs/first"\]$'):
        from_toml(TrainConfig, file)
