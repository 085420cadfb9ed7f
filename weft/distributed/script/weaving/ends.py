"""How a script's process leaves the others: when its main thread has ended, in whatever way.

main thread     script .............. ends, exits or fails
servers                .........................................  until all ranks have left
closing         waits for the main thread ....| leaves; after an error at once, and the servers with it
"""

import sys
import threading
from contextlib import nullcontext, suppress

from weft.distributed.script.weaving.weaving import close_weavings
from weft.distributed.script.world.world import World

__all__ = ["close_at_end"]


def close_at_end(world: World) -> None:
    """Close what the script has woven when it is over.

    Functions of atexit would come too late: Python first waits for threads, of which a server is one.
    """

    def close() -> None:
        threading.main_thread().join()
        error = getattr(sys, "last_value", None)
        # What the servers make of a rank that failed is no news.
        with suppress(Exception) if error is not None else nullcontext():
            close_weavings(world, error)

    threading.Thread(target=close, name="end of script").start()
