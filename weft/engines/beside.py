"""Threads that work beside a block, and whose errors are not lost."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

__all__ = ["run_beside"]


@contextmanager
def run_beside(bodies: Mapping[str, Callable[[], None]], dismiss: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Run each body in a thread of that name, to its end; the first error of one is raised.

    A body that failed is also why the block, which only sees it gone, fails a while later: then its error is raised,
    from the block's.

    Args:
        dismiss: called if the block fails, to end bodies that would go on; that they fail then is no news.
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
        dismiss()
        if causes and isinstance(error, Exception):
            raise causes[0] from error
        raise
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
