"""Mutations of the status page: access without permission, or delays of the engine."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

HTTP = "lmcache_async/metrics/http.py"
SERVER = "lmcache_async/metrics/server.py"
TEST_ACCESS = ("tests/web/test_access.py",)
TEST_SERVER = ("tests/web/test_server.py",)

WEB = (
    Mutation(
        "web: any token is accepted",
        HTTP,
        "hmac.compare_digest(given, known) for known",
        "True for known",
        TEST_ACCESS,
    ),
    Mutation(
        "web: a page of another site reads the loopback",
        HTTP,
        "if self.loopback and not is_loopback_name(",
        "if False and not is_loopback_name(",
        TEST_SERVER,
    ),
    Mutation(
        "web: no token is required beyond the loopback",
        "lmcache_async/config/model.py",
        "and self.token_file is None and not",
        "and False and not",
        TEST_SERVER,
    ),
    Mutation(
        "web: silent clients are never disconnected",
        SERVER,
        "asyncio.timeout(self._timeout_s)",
        "asyncio.timeout(9999)",
        TEST_SERVER,
    ),
    Mutation(
        "web: the number of connections is unlimited",
        SERVER,
        "len(self._connections) >= self._max_connections",
        "False",
        TEST_SERVER,
    ),
    Mutation(
        "web: control characters in names reach the terminal",
        "lmcache_async/cli/output.py",
        'letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}"',
        "letter",
        ("tests/web/test_top.py",),
    ),
)
