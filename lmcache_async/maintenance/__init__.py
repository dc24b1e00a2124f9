"""Operations on stored records without an engine, for the command line.

All functions raise ConfigError if a store lacks a capability that they need or an argument is wrong, and
TierUnavailableError if a store does not answer.
"""
