"""How, with what and where a run was made."""

from weft.records.record import RunRecord
from weft.report.settings import PARTS, settings_of

__all__ = ["provenance_rows"]

SHORT_HASH = 12


def provenance_rows(record: RunRecord) -> list[tuple[str, str]]:
    """The facts by which numbers are judged, as keys and values; what the record does not know is left out."""
    rows = [
        *((part, _pairs(settings_of(record, part))) for part in PARTS),
        ("fixed hash", record.fixed_hash[:SHORT_HASH]),
        ("data", ", ".join(dict.fromkeys(r.data_checksum[:SHORT_HASH] for r in record.repetitions if r.data_checksum))),
        ("created", record.created),
        ("source", _source(record)),
        ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items())),
        ("machine", _machine(record)),
        ("clock", record.clock_rules),
    ]
    return [(key, value) for key, value in rows if value]


def _pairs(settings: dict[str, str]) -> str:
    return "  ".join(f"{key}={value}" for key, value in settings.items())


def _source(record: RunRecord) -> str:
    commit = str(record.source.get("commit", ""))[:SHORT_HASH]
    return f"{commit} with changes that are not committed" if commit and record.source.get("dirty") else commit


def _machine(record: RunRecord) -> str:
    machine = record.machine
    facts = [
        str(machine.get("cpu", "")),
        *map(str, machine.get("cpu_features", [])),
        f"{machine['cores']} cores" if machine.get("cores") else "",
        f"{machine['memory_bytes'] / 1e9:.1f} GB" if machine.get("memory_bytes") else "",
        f"{machine['torch_threads']} threads" if machine.get("torch_threads") else "",
        *map(str, machine.get("cuda_devices", [])),
        f"on {machine['device']}" if machine.get("device", "cpu") != "cpu" else "",
    ]
    return ", ".join(fact for fact in facts if fact)
