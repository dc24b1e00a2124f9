"""Files with keys, tokens and passwords."""

from __future__ import annotations

from pathlib import Path


def secret_file(folder: Path, text: str, mode: int = 0o600, *, name: str = "secret") -> Path:
    """Write a file that by default only its owner may read."""
    path = folder / name
    path.write_text(text)
    path.chmod(mode)
    return path
