"""`python -m weft`: the same as `weft`."""

from weft.cli.main import main

if __name__ == "__main__":
    main()
