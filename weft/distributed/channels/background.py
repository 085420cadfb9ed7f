"""Threads that run in the background of a block, and whose errors are not lost."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

__all__ = ["run_in_background"]


@contextmanager
def run_in_background(
    bodies: Mapping[str, Callable[[], None]], *, on_failure: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Run each body in a thread of that name, to its end; the first error of one is raised.

    A body that failed is also why the block, which only sees it gone, fails a while later: then its error is raised,
    from the block's.

    Args:
        on_failure: called if the block fails, to end bodies that would go on; that they fail then is no news.
    """
    errors: list[Exception] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), name=name) for name, body in bodies.items()]
    for thread in threads:
        thread.start()
    try:
        yield
    except BaseException as error:
        causes = errors[:1]
        on_failure()
        if causes and isinstance(error, Exception):
            raise causes[0] from error
        raise
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
