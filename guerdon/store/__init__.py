"""Data on disk: the native store, the documents' formats, and what reads, copies and describes them."""

from guerdon.store.episode_store import EpisodeStore
from guerdon.store.formats import FORMATS, detect_format, get_format
from guerdon.store.store_writer import StoreWriter
from guerdon.store.summary import convert, inspect, usable

__all__ = [
    "FORMATS",
    "EpisodeStore",
    "StoreWriter",
    "convert",
    "detect_format",
    "get_format",
    "inspect",
    "usable",
]
