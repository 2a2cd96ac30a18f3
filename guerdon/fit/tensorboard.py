"""TensorBoard's writer without its thread.

By default a thread writes the events. A full disk ends that thread with a traceback, and whoever adds more
events waits for it for ever. Here they are written by whoever adds them, and an error is theirs.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.writer import FileWriter

from guerdon.core.atomic import append_whole, storage_errors

FLUSH_SECONDS, FLUSH_BYTES = 30.0, 1 << 16
VERSION = "brain.Event:2"


class EventWriter(SummaryWriter):  # type: ignore[misc]
    """A `SummaryWriter` whose failures are raised where they belong, as `StorageError`."""

    file_writer: Any
    all_writers: Any

    def _get_file_writer(self) -> Any:
        if self.file_writer is None:
            files = self.file_writer = _Files(Path(self.logdir))
            if self.purge_step is not None:
                start = SessionLog(status=SessionLog.START)
                files.add_event(Event(step=self.purge_step, file_version=VERSION))
                files.add_event(Event(step=self.purge_step, session_log=start))
            self.all_writers = {files.get_logdir(): files}
        return self.file_writer


class _Files(FileWriter):  # type: ignore[misc]
    """The makers of events of `FileWriter`, over `_Events`."""

    def __init__(self, folder: Path) -> None:
        self.event_writer = _Events(folder)
        self._default_metadata: dict[str, Any] = {}


class _Events:
    """Appends events to a new file; those that do not fit on the disk are lost, those before them are not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        stamp = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / stamp
        self._waiting = bytearray()
        self._flushed = time.monotonic()
        with storage_errors(self._path):
            self._handle: int | None = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self.add_event(Event(wall_time=time.time(), file_version=VERSION))

    def get_logdir(self) -> str:
        return str(self._folder)

    def add_event(self, event: Any) -> None:
        """Keep one event: its length and its bytes, each with a checksum."""
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        self._waiting += length + struct.pack("<I", masked_crc32c(length))
        self._waiting += content + struct.pack("<I", masked_crc32c(content))
        late = time.monotonic() > self._flushed + FLUSH_SECONDS
        if late or len(self._waiting) > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is kept."""
        waiting, self._waiting = bytes(self._waiting), bytearray()
        self._flushed = time.monotonic()
        if waiting and self._handle is not None:
            with storage_errors(self._path):
                append_whole(self._handle, waiting)

    def close(self) -> None:
        """Write what is kept and close; may be called again."""
        if self._handle is not None:
            try:
                self.flush()
            finally:
                os.close(self._handle)
                self._handle = None
