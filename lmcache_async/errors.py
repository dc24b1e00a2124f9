"""Every error that we raise, by what its receiver can do about it.

A miss is a value (`None`), never an error. Inside a serving engine none of these
leaves our code: a failure becomes a miss or a counted drop.
"""


class LMCacheAsyncError(Exception):
    """The root of all errors of this package."""


class ConfigError(LMCacheAsyncError):
    """A config key or value is wrong; the message names it, its place and the nearest right one."""


class MissingDependencyError(LMCacheAsyncError):
    """A plug-in needs a package that is not installed; the message says which extra to install."""


class UnknownPluginError(ConfigError):
    """No entry point of that name; the message lists the names there are."""


class ChainError(LMCacheAsyncError):
    """Two neighbouring stages of a chain do not fit; the message names both."""


class EngineClosedError(LMCacheAsyncError):
    """The engine was closed, or is not open yet."""


class BudgetExceededError(LMCacheAsyncError):
    """Bytes were not to be had within the deadline, or are more than there will ever be."""


class TierError(LMCacheAsyncError):
    """A tier's backend failed. On a read the caller counts a miss, on a write a drop.

    Attributes:
        retryable: Whether the same call may succeed later without anybody doing anything.
    """

    retryable: bool = False


class TierUnavailableError(TierError):
    """The backend cannot be reached, or answers too late."""

    retryable = True


class TierInUseError(TierUnavailableError):
    """Another process has what only one may have; the message names it."""

    retryable = False


class TierSuspendedError(TierUnavailableError):
    """The tier's breaker is open after too many failures: the call was not even tried."""

    retryable = False


class TierPartUnavailableError(TierUnavailableError):
    """A part of the backend cannot be reached, such as a node of a cluster, and the rest serves on.

    The tier itself leaves that part alone for a while: it is not asked again at once, and no breaker opens.
    """

    retryable = False


class TierFullError(TierError):
    """The tier has no room and cannot make any; the write is dropped."""


class TierClosedError(TierError):
    """The tier was used before it was opened or after it was closed (by us)."""


class ChunkCorruptError(TierError):
    """A record was found whose bytes cannot be proven right. It is a miss and is removed.

    Attributes:
        cause: One word for the counters: `magic`, `version`, `length`, `header`, `key`,
            `namespace`, `tokens`, `layout` or `checksum`; of encryption `tag`, `cipher_key`,
            `encrypted` (without a key here) or `unencrypted` (with one).
    """

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause
