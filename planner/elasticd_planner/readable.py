"""Sizes, times and counts for people."""

from __future__ import annotations


def readable(size: float) -> str:
    """Bytes with a unit: "4 MiB", "31.2 KiB"."""
    units = iter(("bytes", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"


def readable_seconds(seconds: float) -> str:
    """A time with a unit in which its digits say something: "1.250 s", "0.015 s", "4.2 ms", "46 µs"."""
    if seconds == 0 or seconds >= 0.01:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def readable_duration(seconds: float) -> str:
    """A time that people wait: "45 s", "1800 s", "2.5 days"."""
    return f"{seconds / 86_400:.1f} days" if seconds >= 86_400 else f"{seconds:.0f} s"


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 step", "3 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
