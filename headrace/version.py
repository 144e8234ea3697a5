"""The version of this package. In a file of its own, because workers that dial in compare it with the controller's."""

__version__ = "0.1.0"
