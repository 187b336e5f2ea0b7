"""Errors that a user can act on.

Guarantees: the message alone is enough to act on; the command line prints it without a traceback and exits with code 2.
"""


class UserError(Exception):
    """Base of every error whose message is meant for the user."""


class ConfigError(UserError):
    """The configuration cannot be used: an unknown key, a wrong value, or a combination that cannot work."""


class DataError(UserError):
    """A model or a dataset cannot be found or used."""
