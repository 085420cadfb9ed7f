"""What is measured, the statistics that make it trustworthy, and the record of a run.

`measure`, `measured` and `measurements` are exposed by `weft` itself: here `measure` is the module they live in.
"""

from weft.metrics.comparison import NO_DIFFERENCE, Comparison, PairedComparison, compare, compare_pairs
from weft.metrics.energy import EnergyMeter, start_energy_meter
from weft.metrics.flops import UncountedFlopsWarning, count_flops, measured_peak, share_of_peak
from weft.metrics.machine import describe_machine, describe_source, describe_versions
from weft.metrics.measure import (
    MeasuredLoop,
    Measurements,
    SeriesSummary,
    count_samples,
)
from weft.metrics.memory import MemoryPeak, use_process_memory_peak, use_tensor_memory_peak
from weft.metrics.metric import METRICS, Direction, Metric, Rule, find_metric
from weft.metrics.quality import (
    QUALITY,
    QualityMetric,
    Tally,
    accuracy,
    difference_heatmap,
    l1_error,
    l2_error,
    max_error,
    mean_loss,
    variance_heatmap,
)
from weft.metrics.record import SCHEMA, Evaluation, Repetition, RunRecord, Verdict
from weft.metrics.record_file import CLOCK_RULES, RECORD_NAME, new_record, read_record, write_record
from weft.metrics.run_folder import RunFolder, create_run_folder, open_run_folder
from weft.metrics.sampling import LabelBias, dataset_bias, epoch_correlation, sampler_order
from weft.metrics.statistics import (
    MIN_VALUES_FOR_RATIO,
    STATISTICS,
    UNKNOWN,
    Interval,
    Summary,
    count_warmup,
    mann_whitney_less_p,
    mann_whitney_p,
    median_interval,
    olympic_mean,
    ratio_interval,
    ratio_of_medians,
    repetitions_needed,
    summarise,
)
from weft.metrics.strict_json import decode_json, encode_json, parse_json
from weft.metrics.timing import (
    Clock,
    InterleavedTimings,
    Timing,
    TimingRule,
    synchronise_device,
    time_callable,
    time_interleaved,
)

__all__ = [
    "CLOCK_RULES",
    "METRICS",
    "MIN_VALUES_FOR_RATIO",
    "NO_DIFFERENCE",
    "QUALITY",
    "RECORD_NAME",
    "SCHEMA",
    "STATISTICS",
    "UNKNOWN",
    "Clock",
    "Comparison",
    "Direction",
    "EnergyMeter",
    "Evaluation",
    "InterleavedTimings",
    "Interval",
    "LabelBias",
    "MeasuredLoop",
    "Measurements",
    "MemoryPeak",
    "Metric",
    "PairedComparison",
    "QualityMetric",
    "Repetition",
    "Rule",
    "RunFolder",
    "RunRecord",
    "SeriesSummary",
    "Summary",
    "Tally",
    "Timing",
    "TimingRule",
    "UncountedFlopsWarning",
    "Verdict",
    "accuracy",
    "compare",
    "compare_pairs",
    "count_flops",
    "count_samples",
    "count_warmup",
    "create_run_folder",
    "dataset_bias",
    "decode_json",
    "describe_machine",
    "describe_source",
    "describe_versions",
    "difference_heatmap",
    "encode_json",
    "epoch_correlation",
    "find_metric",
    "l1_error",
    "l2_error",
    "mann_whitney_less_p",
    "mann_whitney_p",
    "max_error",
    "mean_loss",
    "measured_peak",
    "median_interval",
    "new_record",
    "olympic_mean",
    "open_run_folder",
    "parse_json",
    "ratio_interval",
    "ratio_of_medians",
    "read_record",
    "repetitions_needed",
    "sampler_order",
    "share_of_peak",
    "start_energy_meter",
    "summarise",
    "synchronise_device",
    "time_callable",
    "time_interleaved",
    "use_process_memory_peak",
    "use_tensor_memory_peak",
    "variance_heatmap",
    "write_record",
]
