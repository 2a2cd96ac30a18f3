"""The native store: memory-mapped frames, a journal while writing, a parquet index afterwards."""

from guerdon.data.store.episode_store import EpisodeStore
from guerdon.data.store.store_writer import StoreWriter

__all__ = ["EpisodeStore", "StoreWriter"]
