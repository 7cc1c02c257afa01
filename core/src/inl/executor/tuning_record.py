"""Records of kernel measurements and quarantined configurations, and their JSON.

``{"format": "inl-tuning/1", "measured": [...], "quarantined": [...]}``
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from inl.backend.tunable import Facts
from inl.bounded_json import parse_json
from inl.errors import RequestError
from inl.spec.workload import Config, Workload, frozen

FORMAT = "inl-tuning/1"


@dataclass(frozen=True, slots=True)
class TuningMeasurement:
    """The fastest correct configuration for one workload."""

    work: Workload
    facts: Facts
    config: Config
    seconds: float
    before: float
    """Seconds of the default configuration; of the fastest if the default failed."""
    when: str
    """Date, such as 2026-11-21."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Unique key of the measurement."""
        return (self.work, self.facts)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A configuration with wrong results or a crashed process."""

    work: Workload
    facts: Facts
    kernel: str
    """Label, such as ``norm_mlp/triton``."""
    config: Config
    reason: str
    when: str

    @property
    def key(self) -> tuple[Any, ...]:
        """Unique key of the entry."""
        return (self.work, self.facts, self.kernel, frozen(self.config))


@dataclass(frozen=True, slots=True)
class Record:
    """Content of a tuning file."""

    measured: Mapping[Any, TuningMeasurement] = field(default_factory=dict)
    quarantined: Mapping[Any, Quarantined] = field(default_factory=dict)

    def merged(self, other: Record) -> Record:
        """Return the union; of equal keys the newer, of equal dates that of ``other``.

        A configuration that either has in quarantine stays there and is dropped from
        the measurements.
        """
        measured = dict(self.measured)
        for key, entry in other.measured.items():
            own = measured.get(key)
            if own is None or own.when <= entry.when:
                measured[key] = entry
        quarantined = {**self.quarantined, **other.quarantined}
        bad = {(q.work, q.facts, frozen(q.config)) for q in quarantined.values()}
        measured = {
            key: entry
            for key, entry in measured.items()
            if (entry.work, entry.facts, frozen(entry.config)) not in bad
        }
        return Record(measured, quarantined)

    def without(
        self, drop: Callable[[TuningMeasurement | Quarantined], bool]
    ) -> Record:
        """Return the entries for which ``drop`` is false."""
        return Record(
            {key: m for key, m in self.measured.items() if not drop(m)},
            {key: q for key, q in self.quarantined.items() if not drop(q)},
        )

    def __len__(self) -> int:
        return len(self.measured) + len(self.quarantined)


def record(*entries: TuningMeasurement | Quarantined) -> Record:
    """Return a record of these entries."""
    return Record(
        {e.key: e for e in entries if isinstance(e, TuningMeasurement)},
        {e.key: e for e in entries if isinstance(e, Quarantined)},
    )


def parse(data: bytes | str, where: str) -> Record:
    """Parse and check the JSON of a tuning file; ``where`` names it in errors.

    Raises :class:`~inl.errors.RequestError`.
    """
    document = parse_json(data, where)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RequestError(
            f"{where}: not a {FORMAT!r} file; `inl tune --export` writes one"
        )
    entries: list[TuningMeasurement | Quarantined] = []
    for kind, build in (("measured", _measured), ("quarantined", _quarantined)):
        for index, item in enumerate(_typed(document, kind, list, where)):
            at = f"{where}: {kind}[{index}]"
            if not isinstance(item, dict):
                raise RequestError(f"{at}: found {item!r:.40}, accepted: an object")
            entries.append(build(item, at))
    return record(*entries)


def _typed(item: Mapping[str, Any], name: str, kind: Any, where: str) -> Any:
    value = item.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        names = getattr(kind, "__name__", "number")
        raise RequestError(f"{where}: {name}: found {value!r:.40}, accepted: a {names}")
    return value


def _shared(item: Mapping[str, Any], where: str) -> tuple[Workload, Facts, Config]:
    work = Workload(*(_typed(item, name, str, where) for name in Workload._fields))
    facts = Facts(*(_typed(item, name, str, where) for name in Facts._fields))
    config = _typed(item, "config", dict, where)
    for name in config:
        _typed(config, name, int, f"{where}: config")
    return work, facts, config


def _measured(item: Mapping[str, Any], where: str) -> TuningMeasurement:
    number = (int, float)
    seconds, before = (
        float(_typed(item, name, number, where)) for name in ("seconds", "before")
    )
    return TuningMeasurement(
        *_shared(item, where), seconds, before, _typed(item, "when", str, where)
    )


def _quarantined(item: Mapping[str, Any], where: str) -> Quarantined:
    work, facts, config = _shared(item, where)
    kernel, reason, when = (
        _typed(item, name, str, where) for name in ("kernel", "reason", "when")
    )
    return Quarantined(work, facts, kernel, config, reason, when)


def dump(record: Record) -> str:
    """Return the JSON of a tuning file."""

    def flat(entry: TuningMeasurement | Quarantined) -> dict[str, Any]:
        rest = asdict(entry)
        del rest["work"], rest["facts"]
        return {**entry.work._asdict(), **entry.facts._asdict(), **rest}

    return json.dumps(
        {
            "format": FORMAT,
            "measured": [flat(entry) for entry in record.measured.values()],
            "quarantined": [flat(entry) for entry in record.quarantined.values()],
        },
        indent=1,
    )
