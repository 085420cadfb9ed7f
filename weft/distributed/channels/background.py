"""Threads that run in the background of a block, and whose errors are not lost."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

__all__ = ["Body", "run_in_background"]

Body = tuple[Callable[[], object], Callable[[], None]]
"""The call that a thread makes, and one that ends it, which is made when the first has returned, too."""


@contextmanager
def run_in_background(bodies: Mapping[str, Body]) -> Iterator[None]:
    """Run each body in a thread of that name, to its end; the first error of one is raised.

    A body that failed is also why the block, which only sees it gone, fails a while later: then its error is raised,
    from the block's. If the block fails first, the bodies are ended; that they fail then is no news.
    """
    errors: list[Exception] = []

    def run(body: Callable[[], object], end: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:
            errors.append(error)  # before anybody can see that it is gone
        finally:
            end()

    threads = [threading.Thread(target=run, args=body, name=name) for name, body in bodies.items()]
    for thread in threads:
        thread.start()
    try:
        yield
    except BaseException as error:
        causes = errors[:1]
        for _, end in bodies.values():
            end()
        if causes and isinstance(error, Exception):
            raise causes[0] from error
        raise
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
