"""The version of this package: also part of the key under which compiled graphs are cached on disk."""

VERSION = "0.1.0"
