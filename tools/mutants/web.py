"""Mutations of the status page: access without permission, or delays of the engine."""

from __future__ import annotations

from tools.mutants.mutation import Mutation

ACCESS = "lmcache_async/web/access.py"
ANSWERS = "lmcache_async/web/answers.py"
SERVER = "lmcache_async/web/server.py"
TEST_ACCESS = ("tests/web/test_access.py",)
TEST_SERVER = ("tests/web/test_server.py",)

WEB = (
    Mutation(
        "web: any token opens",
        ACCESS,
        "hmac.compare_digest(said, known) for known",
        "True for known",
        TEST_ACCESS,
    ),
    Mutation(
        "web: a page of another site reads the loopback",
        ANSWERS,
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
        "call_later(owner._timeout_s, self.abort)",
        "call_later(9999, self.abort)",
        TEST_SERVER,
    ),
    Mutation(
        "web: connections have no bound",
        "lmcache_async/web/gate.py",
        "len(self._inside) >= self._most",
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
