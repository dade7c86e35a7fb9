"""Published tables: what is public about their columns, and how their files are read.

Receives: the name of one, and the folder that the user has it in.
Gives: Splits; PUBLISHED, the tables by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clipwise.data.source import Layout, Source, folder_with, parsed, unescaped
from clipwise.data.splits import Splits
from clipwise.data.tables import SEPARATORS, Table, encoded, read_csv


@dataclass(frozen=True)
class Published:
    """A published table: its files, what is public about its columns, and where it comes from."""

    files: tuple[str, ...]  # the training part, and perhaps the test part
    options: str
    home: str
    places: tuple[str, ...] = ("",)
    mend: Callable[[str], str] = str  # the file's text → csv


_UCI = "the UCI Machine Learning Repository, archive.ics.uci.edu"

PUBLISHED = {
    "sst2": Published(
        ("train.tsv", "dev.tsv"),
        "text=sentence&label=label:0|1&separator=tab",
        "'SST-2' of GLUE, gluebenchmark.com/tasks",
        ("", "SST-2"),
    ),
    # ranges: round numbers around those that Cortez et al. (2009) print in their Table 1
    "wine_red": Published(
        ("winequality-red.csv",),
        "separator=semicolon&label=quality:0..10&columns=fixed acidity:4..16,volatile acidity:0..1.6,citric acid:0..1,"
        "residual sugar:log(0..16),chlorides:log(0..0.7),free sulfur dioxide:0..72,total sulfur dioxide:0..290,"
        "density:0.99..1.004,pH:2.7..4,sulphates:0.3..2,alcohol:8..15",
        f"'Wine Quality', {_UCI}",
    ),
    # the state's borders, and the caps that the set's description names: age 52, income 15, value 500 001
    "california_housing": Published(
        ("cal_housing.data",),
        "names=longitude,latitude,housingMedianAge,totalRooms,totalBedrooms,population,households,medianIncome,"
        "medianHouseValue&label=medianHouseValue:0..500001&columns=longitude:-125..-114,latitude:32..42,"
        "housingMedianAge:0..52,totalRooms:log(0..40000),totalBedrooms:log(0..7000),population:log(0..40000),"
        "households:log(0..7000),medianIncome:0..15",
        "'California Housing' (cal_housing.tgz, Pace and Barry 1997), www.dcc.fc.up.pt/~ltorgo/Regression",
        ("", "CaliforniaHousing"),
    ),
    # the values that adult.names lists; education is there twice, once as a number, and fnlwgt is a survey's weight
    "adult": Published(
        ("adult.data", "adult.test"),
        "names=age,workclass,fnlwgt,education,education-num,marital-status,occupation,relationship,race,sex,"
        "capital-gain,capital-loss,hours-per-week,native-country,income&label=income:<=50K|>50K&columns=age:17..90,"
        "workclass:Private|Self-emp-not-inc|Self-emp-inc|Federal-gov|Local-gov|State-gov|Without-pay|Never-worked,"
        "education-num:1..16,marital-status:Married-civ-spouse|Divorced|Never-married|Separated|Widowed|"
        "Married-spouse-absent|Married-AF-spouse,occupation:Tech-support|Craft-repair|Other-service|Sales|"
        "Exec-managerial|Prof-specialty|Handlers-cleaners|Machine-op-inspct|Adm-clerical|Farming-fishing|"
        "Transport-moving|Priv-house-serv|Protective-serv|Armed-Forces,relationship:Wife|Own-child|Husband|"
        "Not-in-family|Other-relative|Unmarried,race:White|Asian-Pac-Islander|Amer-Indian-Eskimo|Other|Black,"
        "sex:Female|Male,capital-gain:log(0..100000),capital-loss:log(0..5000),hours-per-week:1..99,"
        "native-country:#16",
        f"'Adult', {_UCI}",
        # the C4.5 format: a line with | is a comment, a dot ends a row
        mend=lambda text: re.sub(r"^\|.*$|\.$", "", text, flags=re.MULTILINE),
    ),
}


def table(source: Source) -> Splits:
    """A published table from its folder, with what is public about its columns."""
    published = PUBLISHED[source.name]
    _, folder = folder_with(source, [Layout(published.files, published.places)], published.home)
    said = {**parsed(f"{source.name}?{published.options}").options, **source.options}
    source = Source(source.text, source.name, folder, said)
    names = [unescaped(name) for name in source.listed("names")]
    separator = SEPARATORS[said.get("separator", "comma")]

    def read(path: Path) -> Table:
        text = published.mend(path.read_text(encoding="utf-8-sig"))
        return read_csv(path, text, names, separator, quoted=separator != "\t")

    return encoded(source, [read(folder / file) for file in published.files])
