"""Progress: how durations and losses are shown, on any terminal."""

import io
import sys


def escape_unencodable() -> None:
    """Escapes characters that the terminal cannot encode; Python would raise an error."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.isatty() and out.errors == "strict":
        out.reconfigure(errors="backslashreplace")


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_loss(loss: float | None) -> str:
    """Four decimals, or "-" for None."""
    return "-" if loss is None else f"{loss:.4f}"
