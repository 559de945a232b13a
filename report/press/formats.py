"""One format spec for claims, tables and axes: `3 ms`, `2%`, `3×`, `,d`; the unit sits inside."""

import math
import re
from typing import Any

import pandas as pd

MISSING = "—"
_SPEC = re.compile(r"(?P<whole>,d)|(?P<digits>\d*)(?P<unit>.*)", re.DOTALL)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_CLOSE = ("", "×", "°")  # units that stand at the number without a space


def number(value: float, digits: int = 3) -> str:
    """A number at so many significant digits, thousands grouped, `1.2 × 10⁻⁷` when very small.

    Digits before the point are never dropped: 12,346 stays so at three digits.
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".split("e")[1])
    if not -4 <= exponent < 9:
        mantissa = f"{value:.{digits - 1}e}".split("e")[0].replace("-", "−")
        return f"{mantissa} × 10{str(exponent).translate(_SUPERSCRIPTS)}"
    return f"{value:,.{max(digits - 1 - exponent, 0)}f}".replace("-", "−")


def is_missing(value: Any) -> bool:
    """Whether a value, or one of several, is missing in any of pandas' ways."""
    if isinstance(value, tuple):
        return any(map(is_missing, value))
    return bool(pd.api.types.is_scalar(value) and pd.isna(value))


def formatted(value: Any, spec: str = "") -> str:
    """A value by its spec: significant digits, then the unit; a pair as a range; text as it is.

    >>> formatted(0.0123, "2 ms"), formatted(0.231, "2%"), formatted(17.68, "3×")
    ('0.012 ms', '23 %', '17.7×')
    >>> formatted(16384, ",d"), formatted(None, "3 ms")
    ('16,384', '—')
    >>> formatted((1.028, 1.083), "3×")
    '1.03–1.08×'
    """
    if is_missing(value):
        return MISSING
    if isinstance(value, str | bool):
        return str(value)
    ends = value if isinstance(value, tuple) else (value,)
    digits, sign = _parts(spec)
    texts = dict.fromkeys(_bare(float(end), digits, sign) for end in ends)
    return "–".join(texts) + (sign if sign in _CLOSE else f" {sign}")


def _bare(value: float, digits: int | None, sign: str) -> str:
    if digits is None:
        return f"{round(value):,}".replace("-", "−")
    return number(100 * value if sign == "%" else value, digits)


def tick(value: float, spec: str) -> str:
    """A number at an axis, whose unit stands in the axis's title."""
    shown = 100 * value if unit(spec) == "%" else value
    if 0 < abs(shown) < 1e-3:
        mantissa, _, power = f"{shown:.1e}".partition("e")
        text = f"{mantissa.removesuffix('.0')} × 10{str(int(power)).translate(_SUPERSCRIPTS)}"
        return text.replace("-", "−")
    return f"{shown:,.6g}".replace("-", "−")


def unit(spec: str) -> str:
    """The unit of a spec, for an axis's title; `share` for percentages."""
    return _parts(spec)[1]


def _parts(spec: str) -> tuple[int | None, str]:
    """Digits (None: a whole number) and unit."""
    match = _SPEC.fullmatch(spec)
    assert match is not None
    if match["whole"]:
        return None, ""
    return int(match["digits"] or 4), match["unit"].strip()
