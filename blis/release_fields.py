"""Reading a release's YAML mappings: typed access that names the field when it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NoReturn, Self, TypeVar

import yaml

from blis_replay.blis.errors import ReleaseError

Choice = TypeVar("Choice", bound=str)

# Nanoseconds in a unit; the second table is for quantities per token.
NS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
NS_PER_TOKEN = {f"{unit}/token": ns for unit, ns in NS.items()}

# Bytes and floating-point operations a second.
BYTES_PER_S = {"GB/s": 10**9, "TB/s": 10**12}
FLOPS_PER_S = {"TFLOP/s": 10**12, "PFLOP/s": 10**15}


class Fields:
    """A YAML mapping being read: typed access that names the field when it refuses.

    ``document``: what the whole is, and ``error``: what is raised where it is none.
    """

    document = "a release"
    error: type[Exception] = ReleaseError

    def __init__(self, values: object, origin: str, path: str) -> None:
        self.origin, self.path, self.seen = origin, path, set[str]()
        if not isinstance(values, dict):
            place = f"{origin}, field {path.rstrip('.')}" if path else origin
            raise self.error(f"{place}: is no mapping of fields; write `name: value` lines")
        if not all(isinstance(key, str) for key in values):
            raise self.error(f"{origin}: a field name is no text; write `name: value` lines")
        self.values: dict[str, object] = dict(values)

    @classmethod
    def of_yaml(cls, text: str, origin: str) -> Self:
        """The mapping that a YAML text is; ``origin`` names it in errors."""
        try:
            return cls(yaml.safe_load(text), origin, "")
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            problem = " ".join(str(error).split())[:120]
            raise cls.error(f"{origin}: not YAML ({problem}); mend or replace the file") from None

    def refuse(self, name: str, problem: str, mend: str) -> NoReturn:
        raise self.error(f"{self.origin}, field {self.path}{name}: {problem}; {mend}")

    def refuse_unknown(self) -> None:
        for name in self.values:
            if name not in self.seen:
                self.refuse(name, f"is not a field of {self.document}", "remove it or correct its spelling")

    def text(self, name: str, *, optional: bool = False) -> str:
        self.seen.add(name)
        value = self.values.get(name)
        if value is None and optional:
            return ""
        if not isinstance(value, str) or not value.strip():
            self.refuse(name, "is missing or no text", "add it")
        return value

    def choice(self, name: str, allowed: tuple[Choice, ...]) -> Choice:
        value = self.text(name)
        for option in allowed:
            if option == value:
                return option
        self.refuse(name, f"is {value!r}", f"use one of {', '.join(allowed)}")

    def mapping(self, name: str, *, optional: bool = False) -> Self:
        self.seen.add(name)
        value = self.values.get(name)
        return type(self)({} if value is None and optional else value, self.origin, f"{self.path}{name}.")

    def list(self, name: str, *, optional: bool = False) -> list[Self]:
        self.seen.add(name)
        value = self.values.get(name, [] if optional else None)
        if not isinstance(value, list):
            self.refuse(name, "is missing or no list", "add it")
        return [type(self)(item, self.origin, f"{self.path}{name}[{i}].") for i, item in enumerate(value)]

    def settings(self) -> dict[str, str | int]:
        """Replay settings: words and whole numbers."""
        settings: dict[str, str | int] = {}
        for name, value in self.values.items():
            if isinstance(value, bool) or not isinstance(value, str | int) or (isinstance(value, int) and value > 9):
                self.refuse(name, "is no word or whole number", 'write e.g. "true" or 1')
            settings[name] = value
        return settings

    def numbers(self) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for name, value in self.values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e15:
                self.refuse(name, "is no number", "write a number")
            numbers[name] = float(value)
        return numbers

    def numbers_of(self, name: str) -> tuple[float, ...]:
        """A list of plain numbers."""
        self.seen.add(name)
        values = self.values.get(name)
        if not isinstance(values, list):
            self.refuse(name, "is missing or no list of numbers", "add it")
        places = {str(i): value for i, value in enumerate(values)}
        return tuple(type(self)(places, self.origin, f"{self.path}{name}.").numbers().values())

    def number(self, name: str) -> float:
        """A plain number."""
        self.seen.add(name)
        return type(self)({name: self.values.get(name)}, self.origin, self.path).numbers()[name]

    def count(self, name: str, smallest: int, largest: int, *, optional: bool = False) -> int:
        """A whole number between two others; 0 where it is optional and absent."""
        self.seen.add(name)
        value = self.values.get(name)
        if value is None and optional:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
            self.refuse(name, f"is missing or no whole number from {smallest} to {largest:,}", "correct it")
        return value

    def flag(self, name: str) -> bool:
        """True or false, false where it is absent."""
        self.seen.add(name)
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            self.refuse(name, "is neither true nor false", "write one of them")
        return value

    def quantity(self, name: str, units: Mapping[str, int], *, optional: bool = False) -> int:
        """A number with a unit, in whole nanoseconds (per token)."""
        if self.values.get(name) is None and optional:
            self.seen.add(name)
            return 0
        ns = self.in_unit(name, units)
        if abs(ns) > 10**15:
            self.refuse(name, "is larger than eleven days", "check its unit")
        return round(ns)

    def in_unit(self, name: str, units: Mapping[str, int]) -> float:
        """A number with a unit, times what the unit stands for."""
        self.seen.add(name)
        value = self.values.get(name)
        match = isinstance(value, str) and re.fullmatch(
            r"\s*([-+]?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,2})?)\s+(\S+)\s*", value
        )
        if not match:
            self.refuse(name, "is missing or no number with a unit", f"write e.g. '12.5 {next(iter(units))}'")
        if match[2] not in units:
            self.refuse(name, f"has the unknown unit {match[2]!r}", f"use one of {', '.join(units)}")
        return float(match[1]) * units[match[2]]
