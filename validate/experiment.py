"""Experiments by name, stored and bundled."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from blis_replay.base.errors import UnknownExperimentError
from blis_replay.blis.releases.release import CoefficientRelease, bundled_releases
from blis_replay.fixtures.catalogue import RECORDED_FOLDER, bundled_aliases, bundled_row, recorded_slugs
from blis_replay.ingest.recording import Recording
from blis_replay.ingest.store import Store, list_experiments, open_for_reading, read_stored
from blis_replay.ingest.store.file import writable
from blis_replay.ingest.store.recordings import ExperimentRow, experiments_named, resolve
from blis_replay.replay.release_file import load_release
from blis_replay.validate import STORE_DEFAULT

DEFAULT_RELEASE = "h100-vllm-0.15.1"
# Fitted to other recordings that ship.
_OTHER_RELEASES = ("cpu-vllm-0.32.0",)

WILDCARDS = set("*?[")


def find_experiment(store: Store, name: str) -> str:
    """The slug of a stored or bundled experiment; a bundled one is brought into the store.

    ``name``: slug, alias, or a pattern that matches one of them.  A recording that was ingested under a bundled slug
    takes precedence, and so does a stored one over a bundled one of the same alias.
    Raises ``UnknownExperimentError`` for an unknown or ambiguous name.
    """
    if set(name) & WILDCARDS:
        slugs = select_experiments(store, [name])
        if len(slugs) > 1:
            raise UnknownExperimentError(f"{name} matches {len(slugs)} experiments, one is needed: {', '.join(slugs)}")
        return slugs[0]
    bundled = _bundled_not_stored(store)
    stored = experiments_named(store)
    named = any(name in experiment for experiment in stored.items())
    if name in bundled_releases() and not named:
        raise UnknownExperimentError(f"{name} is a release; name an experiment, and this with --coefficients {name}")
    slug = resolve(stored if named else stored | bundled, name)
    if slug in bundled:
        _bring(store, [slug])
    return slug


def release_for(coefficients: str | None, names: Sequence[str] = ()) -> CoefficientRelease:
    """The release of that name or file; of None the one that ships for these experiments.

    Raises as ``load_release`` does.
    """
    return load_release(release_that_ships(names) if coefficients is None else coefficients)


def release_that_ships(names: Sequence[str]) -> str:
    """``DEFAULT_RELEASE``; but for bundled recordings of a model that only another release has, that one's name."""
    models = _models_that_ship(names)
    for other in _OTHER_RELEASES if models else ():
        if models <= {entry.model for entry in load_release(other).models}:
            return other
    return DEFAULT_RELEASE


def _models_that_ship(names: Sequence[str]) -> set[str]:
    """The models of recordings that ship; none if a name is that of anything else."""
    models: set[str] = set()
    for name in names:
        found = [(a, slug) for a, slug in bundled_aliases().items() if fnmatchcase(a, name) or fnmatchcase(slug, name)]
        if not found or not {slug for _alias, slug in found} <= {*recorded_slugs()}:
            return set()
        models |= {bundled_row(alias, slug).model for alias, slug in found}
    return models


def _bring(store: Store, slugs: Sequence[str]) -> None:
    """Store bundled experiments; to open a store for writing and for reading again takes as long as to store one."""
    if not slugs:
        return
    from blis_replay.fixtures.bundled import bundled_recording  # makes them, and no stored experiment needs it
    from blis_replay.ingest.ingest import ingest_recording  # every check

    with writable(store) as opened:
        for slug in slugs:
            if slug not in recorded_slugs():
                ingest_recording(opened, bundled_recording(slug))
                continue
            from blis_replay.ingest.assemble import read_recording  # every reader, and only this needs them

            with read_recording(RECORDED_FOLDER / slug) as recording:
                ingest_recording(opened, recording)


def stored_experiment(store_path: Path, name: str) -> Recording:
    """The stored or bundled experiment of that name; raises ``UnknownExperimentError``."""
    with open_for_reading(store_path) as store:
        return read_stored(store, find_experiment(store, name))


def all_experiments(store: Store) -> list[str]:
    """Slugs of all experiments, stored and bundled; the bundled are brought into the store."""
    _bring(store, [*_bundled_not_stored(store)])
    return [*experiments_named(store)]


def select_experiments(store: Store, selectors: Sequence[str]) -> list[str]:
    """Slugs that a list of slugs, aliases and patterns (``34b-*``) means, without repetition.

    A pattern is matched against aliases and slugs of stored and bundled experiments.  Raises
    ``UnknownExperimentError`` for an unknown name, and for a pattern that matches nothing.
    """
    bundled = _bundled_not_stored(store)
    known = experiments_named(store) | bundled
    slugs: list[str] = []
    for selector in selectors:
        if not set(selector) & WILDCARDS:
            slugs.append(find_experiment(store, selector))
            continue
        matched = [slug for slug, alias in known.items() if fnmatchcase(alias, selector) or fnmatchcase(slug, selector)]
        if not matched:
            raise UnknownExperimentError(f"no experiment matches {selector}; list them with `blis-replay list`")
        _bring(store, [slug for slug in bundled if slug in {*matched} - {*slugs}])
        slugs += sorted(matched)
    return list(dict.fromkeys(slugs))


def named_experiments(store: Store, selectors: Sequence[str] | None) -> list[str]:
    """Slugs as ``select_experiments`` finds them; of None, all stored and bundled experiments."""
    return all_experiments(store) if selectors is None else select_experiments(store, selectors)


def _bundled_not_stored(store: Store) -> dict[str, str]:
    """The alias of each experiment that ships with the package and is not in the store, by its slug."""
    stored = experiments_named(store)
    return {slug: alias for alias, slug in bundled_aliases().items() if slug not in stored}


def experiment_row(store: Store, slug: str) -> ExperimentRow:
    """The short form of a stored experiment."""
    return next(row for row in list_experiments(store) if row.slug == slug)


def given_options(coefficients: str | None, store_path: Path) -> str:
    """The options that a printed next command must repeat, each with a space before it; without the default store."""
    release = "" if coefficients is None else f" --coefficients {shlex.quote(coefficients)}"
    known = str(store_path) in (str(STORE_DEFAULT), os.environ.get("BLIS_REPLAY_STORE"))
    return release + ("" if known else f" --store {shlex.quote(str(store_path))}")
