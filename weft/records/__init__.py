"""Run folders, and the records in them: every raw value, and everything needed to judge or repeat a run."""

from weft.records.machine import describe_machine, describe_source, describe_versions
from weft.records.record import SCHEMA, Evaluation, Repetition, RunRecord, Verdict
from weft.records.record_file import CLOCK_RULES, RECORD_NAME, new_record, read_record, write_record
from weft.records.run_folder import RunFolder, create_run_folder, open_run_folder
from weft.records.strict_json import decode_json, encode_json, parse_json

__all__ = [
    "CLOCK_RULES",
    "RECORD_NAME",
    "SCHEMA",
    "Evaluation",
    "Repetition",
    "RunFolder",
    "RunRecord",
    "Verdict",
    "create_run_folder",
    "decode_json",
    "describe_machine",
    "describe_source",
    "describe_versions",
    "encode_json",
    "new_record",
    "open_run_folder",
    "parse_json",
    "read_record",
    "write_record",
]
