"""Exceptions of this package, divided by the possible reactions of a caller.

A miss is a value (`None`), never an exception. No exception of this package reaches an inference server: a
failure becomes a miss or a counted drop.
"""


class LMCacheAsyncError(Exception):
    """Base class of all exceptions of this package."""


class ConfigError(LMCacheAsyncError):
    """A configuration key or value is invalid.

    The message contains the key or value, the place where it was set, and the nearest valid one.
    """


class MissingDependencyError(LMCacheAsyncError):
    """A plug-in needs a package that is not installed. The message contains the extra to install."""


class UnknownPluginError(ConfigError):
    """No entry point has this name. The message lists the existing names."""


class ChainError(LMCacheAsyncError):
    """Two adjacent stages of a chain do not fit together. The message contains both."""


class EngineClosedError(LMCacheAsyncError):
    """The engine is closed or not open yet."""


class BudgetExceededError(LMCacheAsyncError):
    """A byte reservation timed out or exceeds the capacity."""


class TierError(LMCacheAsyncError):
    """The backend of a tier failed. The caller counts a miss on a read and a drop on a write.

    Attributes:
        retryable: Whether the same call may succeed later without intervention.
    """

    retryable: bool = False


class TierUnavailableError(TierError):
    """The backend is unreachable or timed out."""

    retryable = True


class TierInUseError(TierUnavailableError):
    """Another process uses an exclusive resource of the tier. The message contains the resource."""

    retryable = False


class TierSuspendedError(TierUnavailableError):
    """The circuit breaker of the tier is open after too many failures. The call was not tried."""

    retryable = False


class TierPartUnavailableError(TierUnavailableError):
    """A part of the backend is unreachable, such as a node of a cluster; the rest is available.

    The tier itself suspends this part for a while: the call is not retried and does not open the breaker.
    """

    retryable = False


class TierFullError(TierError):
    """The tier is full and cannot evict enough. The write is dropped."""


class TierClosedError(TierError):
    """The tier was used before it was opened or after it was closed by the engine."""


class ChunkCorruptError(TierError):
    """The verification of a record failed. The record is a miss and is removed.

    Attributes:
        cause: Label of the counters: `magic`, `version`, `length`, `header`, `key`, `namespace`, `tokens`,
            `layout`, `checksum` or `file` (not a regular file); for encryption `tag`, `cipher_key`, `encrypted` (an
            encrypted record, but no key is configured) or `unencrypted` (a plain record, but a key is configured).
    """

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause
