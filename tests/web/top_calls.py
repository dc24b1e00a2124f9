"""Calls of `lmcache-async top`, for its tests."""

from __future__ import annotations

from typer.testing import CliRunner

from lmcache_async.cli.app import app

WIDE = {"COLUMNS": "160", "TERM": "dumb"}


def call(*arguments: str, **env: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["top", *arguments], env=WIDE | env)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output
