"""zstd frames of offset maps: written as a stream of unknown length, read within bounds.

A frame of 3 KB can claim gigabytes, so a reader never asks for more than it has room for.
The library zstandard is an extra: it is imported when the first frame is written or read.
"""

from __future__ import annotations

from kafkamq.errors import ConfigError, WireError

LEVEL = 3
"""zstd's own default, and Parallel Consumer's."""

_MAX_WINDOW_BYTES = 8 * 1024 * 1024  # what every zstd decoder should take; level 3 asks for 2 MiB
_MAX_BLOCK_BYTES = 128 * 1024
_HEADER_BYTES = 6  # magic number, descriptor, window
_SMALLEST_BLOCK_BYTES = 4  # one byte, repeated
_SLICE_BYTES = 64  # at most 16 blocks begin in it, so it yields at most 2 MiB


def require_zstandard() -> None:
    """Make sure, before the first commit, that offset maps can be written."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        raise ConfigError(
            "offset maps need zstandard, which is not installed: pip install 'kafkamq[parallel]'"
        ) from None


class Compressor:
    """Writes frames one after the other; one thread at a time."""

    def __init__(self) -> None:
        import zstandard

        self._context = zstandard.ZstdCompressor(level=LEVEL)

    def compress(self, body: bytes) -> bytes:
        """A frame without the length of its content, as a Java output stream writes it."""
        stream = self._context.compressobj()
        return stream.compress(body) + stream.flush()


def smallest_frame_bytes(body_bytes: int) -> int:
    """No frame of a body of that length is smaller, whatever is in it."""
    blocks = -(-body_bytes // _MAX_BLOCK_BYTES)
    return _HEADER_BYTES + blocks * _SMALLEST_BLOCK_BYTES


def decompress(data: bytes, *, max_bytes: int) -> tuple[bytes, int]:
    """The content of the frame that the data begin with, and how many bytes it takes."""
    import zstandard

    stream = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
    parts: list[bytes] = []
    size = end = 0
    while end < len(data) and not stream.eof:
        try:
            part = stream.decompress(data[end : end + _SLICE_BYTES])
        except zstandard.ZstdError as error:
            raise WireError("an offset map with an invalid zstd frame") from error
        size += len(part)
        if size > max_bytes:
            raise WireError(f"an offset map of more than {max_bytes} bytes in its zstd frame")
        parts.append(part)
        end = min(len(data), end + _SLICE_BYTES)
    if not stream.eof:
        raise WireError("an offset map with a zstd frame that is cut off")
    return b"".join(parts), end - len(stream.unused_data)
