"""Mutations of the status page: access without permission, or delays of the engine."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

HTTP = "lmcache_async/metrics/http.py"
SERVER = "lmcache_async/metrics/server.py"
TEST_ACCESS = ("tests/web/test_access.py",)
TEST_SERVER = ("tests/web/test_server.py",)

WEB = (
    Mutation(
        "web: any token opens",
        HTTP,
        "hmac.compare_digest(given, known) for known",
        "True for known",
        TEST_ACCESS,
    ),
    Mutation(
        "web: a page of another site reads the loopback",
        HTTP,
        "if self._loopback and not is_loopback_name(",
        "if False and not is_loopback_name(",
        TEST_SERVER,
    ),
    Mutation(
        "web: beyond the loopback nobody has to say a token",
        "lmcache_async/config/model.py",
        "and self.token_file is None and not",
        "and False and not",
        TEST_SERVER,
    ),
    Mutation(
        "web: who says nothing stays for ever",
        SERVER,
        "asyncio.timeout(self._timeout_s)",
        "asyncio.timeout(9999)",
        TEST_SERVER,
    ),
    Mutation(
        "web: connections have no bound",
        SERVER,
        "len(self._connections) >= self._max_connections",
        "False",
        TEST_SERVER,
    ),
    Mutation(
        "web: a name of somebody else's rules the terminal",
        "lmcache_async/cli/output.py",
        'letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}"',
        "letter",
        ("tests/web/test_top.py",),
    ),
)
