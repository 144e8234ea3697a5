"""The version of this package. Workers that connect over TCP compare it with the controller's."""

__version__ = "0.1.0"
