"""Bodies on their way to the first client: kept as they pass, in memory up to a limit and beyond it in a body store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from .bodies import Sink
from .errors import BodyStoreError
from .recorded import Elsewhere
from .store.failures import cause

_LARGE: Final = (
    "{size} are more than IDEMPOTENCY_MAX_BODY, which is {limit}. IDEMPOTENCY_BODY_STORE gives larger answers a place; "
    "streams without end (text/event-stream, multipart/x-mixed-replace) are never kept there"
)


def size_of(chunk: Any) -> int:
    """The size of a piece of an answer, in bytes.

    :raises TypeError: it is none: no server could send it, and not all that has a length, or makes bytes, is a piece.
    """
    try:
        return memoryview(chunk).nbytes
    except TypeError:
        raise TypeError(
            f"An answer is made of pieces of bytes, and one of them is of {type(chunk).__name__}."
        ) from None


class Ready:
    """A body that is all there.

    :ivar size: in bytes.
    :ivar why: why it is not kept, where that is so.
    :raises TypeError: it is not made of bytes.
    """

    def __init__(self, chunks: list[bytes], limit: int, sink: Callable[[], Sink] | None) -> None:
        self.size = sum(map(size_of, chunks))
        self.why = _LARGE.format(size=f"{self.size} bytes", limit=limit)
        self.trouble: BodyStoreError | None = None
        self._chunks = chunks
        self._large = self.size > limit
        self._make_sink = sink
        self._sink: Sink | None = None

    def body(self) -> bytes | Elsewhere | None:
        """What is to be recorded: the body itself, or one over the limit as it lies in the body store, if it does."""
        if not self._large:
            return b"".join(self._chunks)
        if self._make_sink is None:
            return None
        self._sink = self._make_sink()
        try:
            for chunk in self._chunks:
                self._sink.write(chunk)
            return self._sink.finish()
        except BodyStoreError as error:
            self.trouble = error
            self.drop()
            return None

    def drop(self) -> None:
        """Delete what was written."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.discard()


class Tee:
    """A stream that keeps what passes through it, up to a limit; with ``None`` for it, nothing.

    What passes the limit goes on into a sink, where there is one to be had, and no more than one chunk is in memory.

    :ivar body: what passed; ``None`` where it is too large or broke off.
    :ivar why: why it is not kept, where that is so.
    :ivar crashed: it ended in an exception that is no ``Exception``, so nothing is known of it.
    :ivar trouble: why the sink took no more.
    """

    def __init__(
        self,
        stream: Iterator[bytes],
        source: object,
        limit: int | None,
        patience: float,
        sink: Callable[[], Sink] | None = None,
        length: int | None = None,
    ) -> None:
        """
        :param length: how many bytes it announces. One that ends with less broke off, and its client knows.
        """
        self._stream = stream
        self._source = source
        self._limit = limit
        self._patience = patience
        self._make_sink = sink
        self._length = length
        self._sink: Sink | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._unwanted = False
        self._closed = False
        self.why = ""
        self.complete = False
        self.crashed = False
        self.body: bytes | Elsewhere | None = None
        self.trouble: BodyStoreError | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            chunk = next(self._stream)
        except StopIteration:
            self._end()
            raise
        except Exception as error:
            # Bytes may have left: the answer is not whole, and the view must not run again.
            self.give_up(f"the stream broke off after {self._size} bytes with {cause(error)}")
            raise
        except BaseException:
            self.crashed = True
            raise
        if not self.complete:
            self._take(chunk)
        return chunk

    def give_up(self, why: str = "", *, now: bool = True) -> None:
        """Keep nothing of it. What is left passes through.

        :param why: for people.
        :param now: whether to delete at once what the body store has of it; else :meth:`drop` does.
        """
        self.why = why
        self._chunks.clear()
        self.body, self.complete = None, True
        if now:
            self._discard()

    def drop(self) -> None:
        """Nobody wants the body any more. From whatever thread: a stream that still passes sees it by itself."""
        self._unwanted = True
        if self.complete:
            self._discard()

    def close(self) -> None:
        """Close the stream behind, once (PEP 3333). What the client did not wait for is taken in first."""
        if self._closed:
            return
        self._closed = True
        try:
            self._drain()
        finally:
            for one in (self._stream, self._source):
                close = getattr(one, "close", None)
                if close is not None:
                    close()

    def _take(self, chunk: bytes) -> None:
        """Keep a piece, in memory or beyond the limit in the sink. A piece that is missing leaves nothing to keep."""
        try:
            self._size += size_of(chunk)
            if self._limit is not None:
                self._keep(chunk, self._limit)
        except TypeError as error:
            self.give_up(f"the stream broke off: {error}")
            raise
        except BodyStoreError as error:
            self.trouble = error
            self.give_up(str(error))
        except Exception as error:  # no memory for a copy, say: the client's own piece is there
            self.give_up(f"a piece of the stream could not be kept: {cause(error)}")
        except BaseException:
            self.crashed = True
            raise

    def _keep(self, chunk: bytes, limit: int) -> None:
        if self._unwanted:
            self.give_up()
        elif self._sink is None and self._size <= limit:
            self._chunks.append(bytes(chunk))  # a view may fill one buffer again and again
        elif self._make_sink is None:
            self.give_up(_LARGE.format(size=f"{self._size} bytes of a stream", limit=limit))
        else:
            self._spill(chunk)

    def _spill(self, chunk: bytes) -> None:
        if self._sink is None:
            assert self._make_sink is not None
            self._sink = self._make_sink()
            for one in self._chunks:
                self._sink.write(one)
            self._chunks.clear()
        self._sink.write(chunk)

    def _end(self) -> None:
        if self.complete:
            return
        if self._length is not None and self._size < self._length:
            self.give_up(f"the stream ended after {self._size} bytes, and its Content-Length announces {self._length}")
            return
        try:
            self.body = b"".join(self._chunks) if self._sink is None else self._sink.finish()
        except BodyStoreError as error:
            self.trouble = error
            self.give_up(str(error))
        except Exception as error:
            self.give_up(f"the stream could not be kept: {cause(error)}")
        except BaseException:
            self.crashed = True
            raise
        self.complete = True
        if self._unwanted:  # since the last piece: whoever said so may have found it still passing
            self._discard()

    def _discard(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.discard()

    def _drain(self) -> None:
        """Take in the rest, within a bounded time, and within the limit where there is no sink."""
        until = time.monotonic() + self._patience
        try:
            while not (self.complete or self.crashed) and time.monotonic() < until:
                next(self)
        except Exception:
            # The end, or a generator that failed: __next__ has noted which.
            pass
        if not (self.complete or self.crashed):
            self.give_up(
                f"its client left after {self._size} bytes at most, and the stream did not end within "
                f"{self._patience:g} seconds"
            )
