# SPDX-License-Identifier: Apache-2.0
"""Output and records of a run: metrics, loggers, the console, and the time by cause. Torch-free at import."""

from podium.observe.console import Console, EvaluationView, SampleView, ShownMetric, StepView
from podium.observe.frames import FrameLibrary, metrics_frame
from podium.observe.loggers import Logger, TableLogger, close_loggers, open_loggers
from podium.observe.metrics import MetricsFile, StepMetrics, read_metrics
from podium.observe.opening import open_console, open_run_console
from podium.observe.start_up import StartUpLog
from podium.observe.timing import CauseTime, Stopwatch, TimeSummary

__all__ = [
    "CauseTime",
    "Console",
    "EvaluationView",
    "FrameLibrary",
    "Logger",
    "MetricsFile",
    "SampleView",
    "ShownMetric",
    "StartUpLog",
    "StepMetrics",
    "StepView",
    "Stopwatch",
    "TableLogger",
    "TimeSummary",
    "close_loggers",
    "metrics_frame",
    "open_console",
    "open_loggers",
    "open_run_console",
    "read_metrics",
]
