"""The compressions by name, as the table of axes names them: functions of a setting."""

from functools import partial

from weft.proving.compression.compression import AbstractCompression, OfSenders
from weft.proving.compression.low_rank import PowerSgd
from weft.proving.compression.quantised import QsgdSender, TernGradSender
from weft.proving.compression.selected import DgcSender, RandomkSender, ThresholdSender, TopkSender
from weft.proving.compression.sender import Setting
from weft.proving.compression.signs import SignSender

__all__ = ["dgc", "onebit", "powersgd", "qsgd", "randomk", "sign", "terngrad", "threshold", "topk"]


def qsgd(setting: Setting) -> AbstractCompression:
    return OfSenders(setting, QsgdSender)


def terngrad(setting: Setting) -> AbstractCompression:
    return OfSenders(setting, TernGradSender)


def onebit(setting: Setting) -> AbstractCompression:
    return OfSenders(setting, partial(SignSender, is_symmetric=False))


def sign(setting: Setting) -> AbstractCompression:
    return OfSenders(setting, partial(SignSender, is_symmetric=True))


def topk(setting: Setting) -> AbstractCompression:
    return OfSenders(setting, TopkSender)


def threshold(setting: Setting) -> AbstractCompression:
    return OfSenders(setting, ThresholdSender)


def randomk(setting: Setting) -> AbstractCompression:
    return OfSenders(setting, RandomkSender)


def dgc(setting: Setting) -> AbstractCompression:
    return OfSenders(setting, DgcSender)


def powersgd(setting: Setting) -> AbstractCompression:
    return PowerSgd(setting)
