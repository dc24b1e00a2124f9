"""What a server's refusals and a connection's failures mean to the tier."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from lmcache_async.errors import TierError, TierFullError, TierUnavailableError
from lmcache_async.resp.wire import ErrorReply

_LATER = frozenset(
    {
        *("LOADING", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "BUSY", "READONLY", "MISCONF", "NOREPLICAS"),
        *("ASK", "UNBLOCKED", "FAILOVER", "NOGOODSLAVE"),
    }
)
"""Codes of what passes by itself, or by what the server's people do."""

_CURES = {
    "OOM": "; raise its maxmemory, or set maxmemory-policy to allkeys-lru or allkeys-lfu",
    "NOAUTH": "; set username and password_file, or password_variable",
    "WRONGPASS": "; check username and password_file, or password_variable",
    "NOPERM": "; allow the user GET, SET, EXISTS, UNLINK and SCAN on the keys of key_prefix",
    "MOVED": "; it is a node of a cluster: set mode to cluster",
    "MISCONF": "; it cannot save to its disk and takes no writes: see its log",
    "READONLY": "; it is a replica: name the master, or set mode to sentinel",
}
CREDENTIAL_CODES = frozenset({"NOAUTH", "WRONGPASS"})


def refusal(where: str, reply: ErrorReply, cures: Mapping[str, str] = _CURES) -> TierError:
    """The error that a refusal is; `cures` is what to add, by the refusal's code."""
    text = reply.text if len(reply.text) <= 200 else f"{reply.text[:197]}..."
    message = f"{where} answered {text!r}{cures.get(reply.code, '')}"
    if reply.code == "OOM":
        return TierFullError(message)
    if reply.code in _LATER or "max number of clients" in reply.text:
        return TierUnavailableError(message)
    return TierError(message)


def no_connection(where: str, error: OSError | UnicodeError, option: str = "url") -> TierError:
    """The error that a failed connect is; `option` names the server."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return TierError(
            f"{where}: its certificate is not accepted: {error.verify_message};"
            " name its authority with tls_ca_file, or see tls_check_hostname"
        )
    if isinstance(error, ssl.SSLError):
        return TierUnavailableError(
            f"{where}: no TLS connection: {error.reason or error}; see whether its port speaks TLS,"
            " and whether it wants tls_cert_file"
        )
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return TierUnavailableError(f"{where}: no connection: {text}; see whether it runs, and {option}")
