"""What a request is answered: who may read what. No I/O."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from lmcache_async.metrics.samples import CONTENT_TYPE
from lmcache_async.web.access import Tokens, is_loopback_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache_async.web.source import Sample, Source

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_SCRIPTS = ("dom.js", "page.js", "plot.js", "requests.js", "tables.js", "tiles.js", "words.js")
_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    **{f"/{name}": (name, "text/javascript; charset=utf-8") for name in _SCRIPTS},
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Of every answer: nothing from elsewhere is loaded, nobody frames it, nothing is kept."""

_FRESH_S = 0.2
"""An answer is given again for so long: many readers cost the loop hardly more than one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent."""

    status: int
    body: bytes
    kind: str = _TEXT
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_headers(self) -> dict[str, str]:
        return {**_HEADERS, "Content-Type": self.kind, **self.headers}


class Answers:
    """Answers requests about one source.

    Args:
        source: What is shown.
        samples: What the charts are of.
        tokens: What readers must say.
        loopback: Only this machine is to reach it: what asks for another host's name is refused.
        interval_s: Between two samples.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        source: Source,
        samples: Sequence[Sample],
        tokens: Tokens,
        *,
        loopback: bool,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._samples = samples
        self._tokens = tokens
        self._loopback = loopback
        self._interval_s = interval_s
        self._clock = clock
        self._page = {path: Answer(200, _read(name), kind) for path, (name, kind) in _PAGE.items()}
        self._fresh: dict[str, tuple[float, Answer]] = {}
        self._made: dict[str, Callable[[], Answer]] = {
            "/metrics": lambda: Answer(200, self._source.metrics(), CONTENT_TYPE),
            "/status.json": lambda: Answer(200, self._status(), _JSON),
        }

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        """Args: headers: Found by any case of their names."""
        if self._loopback and not is_loopback_name(headers.get("Host", "")):
            return _error(421, "this is no server for the host of that name; ask for 127.0.0.1 or localhost")
        if method not in {"GET", "HEAD"}:
            return _error(405, "this can only be read", {"Allow": "GET, HEAD"})
        if path == "/healthz":
            return Answer(200, b"ok\n")
        if not self._tokens.allow(headers.get("Authorization", "")):
            return _error(
                401,
                "a token is needed: Authorization: Bearer TOKEN, or the token as password with any user",
                {"WWW-Authenticate": 'Basic realm="lmcache-async", charset="UTF-8"'},
            )
        if path in self._page:
            return self._page[path]
        if path in self._made:
            return self._recent(path)
        return _error(404, "there are /, /status.json, /metrics and /healthz")

    def _recent(self, path: str) -> Answer:
        made_at, answer = self._fresh.get(path, (0.0, None))
        if answer is None or self._clock() - made_at > _FRESH_S:
            answer = self._made[path]()
            self._fresh[path] = (self._clock(), answer)
        return answer

    def _status(self) -> bytes:
        samples = [*self._samples]
        charts = self._source.charts(samples) if len(samples) > 1 else []
        told: dict[str, Any] = {
            **self._source.status(),
            "charts": {
                "interval_s": self._interval_s,
                "list": [
                    {
                        "title": chart.title,
                        "unit": chart.unit,
                        "stacked": chart.stacked,
                        "note": chart.note,
                        "series": [
                            {"name": series.name, "values": [_short(value) for value in series.values]}
                            for series in chart.series
                        ],
                    }
                    for chart in charts
                ],
            },
        }
        return json.dumps(told, separators=(",", ":"), allow_nan=False).encode()


def _error(status: int, text: str, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, f"{text}\n".encode(), headers=headers or {})


def _short(value: float | None) -> float | None:
    """Four digits are enough to draw with."""
    return None if value is None else float(f"{value:.4g}")


def _read(name: str) -> bytes:
    return (files("lmcache_async.web") / "page" / name).read_bytes()
