"""How far a run came, in a file, so that the next one goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcache_async.errors import ConfigError


class StateFile:
    """A small JSON file, replaced as a whole.

    Args:
        about: What the run is about; a file about something else is refused.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self._about = dict(about)

    def load(self) -> dict[str, Any]:
        """What was saved; nothing when there is no such file.

        Raises:
            ConfigError: The file is of another run, or none of ours.
        """
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            about, state = found["about"], found["state"]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise self.wrong(error) from None
        if about != self._about or not isinstance(state, dict):
            raise ConfigError(
                f"{self.path} is of another run ({about}); this one is {self._about}: name another file, or remove it"
            )
        return state

    def wrong(self, error: Exception) -> ConfigError:
        """What to raise where the file does not hold what a state has."""
        what = f"{type(error).__name__}: {error}"
        return ConfigError(f"{self.path} is no state of an earlier run ({what}): remove it, or name another")

    def save(self, state: Mapping[str, Any]) -> None:
        """Raises OSError when it cannot be written; the old one stays then."""
        beside = self.path.with_name(f"{self.path.name}.new")
        with beside.open("w", encoding="utf-8") as file:
            json.dump({"about": self._about, "state": dict(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
