"""Sizes for people."""

from __future__ import annotations


def readable(size: float) -> str:
    """Bytes with a unit: "4 MiB", "31.2 KiB"."""
    units = iter(("bytes", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"
