"""`weft`, and `python -m weft`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. Ctrl-C is told from the first moment on, while the command line itself is imported too."""
    try:
        from weft.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
