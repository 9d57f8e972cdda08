"""The version of hvdlite, for the package's metadata and for ranks that compare theirs."""

__version__ = "0.1.0"
